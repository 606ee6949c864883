// Finds races of a kernel on the host. The compiler's thread sanitizer calls a function at every
// access to memory; here those functions are our own, so the program is compiled with
// -fsanitize=thread and linked without it. Included by cuda_host.h.
//
// Two accesses of different threads to one byte, one of them a write and not both atomic, are
// ordered by __syncthreads within a block, by __syncwarp within a warp, and by nothing between
// blocks. A race is found whatever the order of execution. Static storage counts as shared memory:
// its bytes are others in every block. Copies by the C library's memcpy are not seen.
#pragma once

#include <unordered_map>

extern "C" char __data_start, _end;

namespace cuda_host {

constexpr int64_t kNobody = -1, kSeveral = -2;

struct Touch {
  int64_t block = kNobody, warp = kNobody, thread = kNobody;
  uint64_t interval = ~uint64_t(0), warp_interval = ~uint64_t(0);
};
enum Access { kRead, kWrite, kAtomic };
struct History {
  Touch touches[3];
};

CUDA_HOST_INTERNAL inline std::unordered_map<uintptr_t, History>& histories() {
  static auto* instance = new std::unordered_map<uintptr_t, History>;
  return *instance;
}
inline void forget_accesses() { histories().clear(); }

CUDA_HOST_INTERNAL inline bool conflicts(const Touch& earlier, const Touch& now, bool shared) {
  if (earlier.block == kNobody) return false;
  if (!shared && earlier.block != now.block) return true;
  if (earlier.interval != now.interval) return false;
  if (earlier.warp != now.warp) return true;
  return earlier.warp_interval == now.warp_interval && earlier.thread != now.thread;
}

// Keeps one thread, warp or block, or that there were several, as long as nothing orders them.
CUDA_HOST_INTERNAL inline void record(Touch& touch, const Touch& now, bool shared) {
  const auto join = [](int64_t before, int64_t after, bool unordered) {
    return unordered && before != kNobody && before != after ? kSeveral : after;
  };
  const bool same_interval = touch.interval == now.interval;
  const bool same_warp = same_interval && touch.warp_interval == now.warp_interval &&
                         (touch.warp == now.warp || touch.warp == kSeveral);
  touch.thread = join(touch.thread, now.thread, same_warp);
  touch.warp = join(touch.warp, now.warp, same_interval);
  touch.block = join(touch.block, now.block, !shared);
  touch.interval = now.interval;
  touch.warp_interval = now.warp_interval;
}

// Checks one access against the earlier ones and remembers it.
inline void look(const void* address, size_t size, Access access, const void* caller) {
  Machine& m = machine();
  const char* begin = static_cast<const char*>(address);
  const Thread& thread = *m.current;
  if (begin >= thread.stack.get() && begin < thread.stack.get() + kStackBytes) return;
  const char* dynamic = reinterpret_cast<const char*>(m.dynamic_shared.get());
  const bool shared = (begin >= &__data_start && begin < &_end) ||
                      (begin >= dynamic && begin < dynamic + m.dynamic_shared_bytes);
  Touch now;
  now.block = block_number();
  now.warp = now.block * int64_t(m.warp_interval.size()) + thread.number / kWarp;
  now.thread = now.block * int64_t(m.count) + thread.number;
  now.interval = m.interval;
  now.warp_interval = m.warp_interval[thread.number / kWarp];
  static const char* const kNames[] = {"read", "write", "atomic"};
  for (size_t i = 0; i < size; ++i) {
    History& history = histories()[reinterpret_cast<uintptr_t>(begin + i)];
    for (int earlier = kRead; earlier <= kAtomic; ++earlier) {
      const bool harmless = earlier == access && access != kWrite;
      if (harmless || !conflicts(history.touches[earlier], now, shared)) continue;
      char text[200];
      std::snprintf(text, sizeof(text), "%s of %s memory after a %s by another thread, pc %p",
                    kNames[access], shared ? "shared" : "global", kNames[earlier], caller);
      fail("race: %s", text);
    }
    record(history.touches[access], now, shared);
  }
}

// What the hooks call. The detector's own accesses do not count.
CUDA_HOST_INTERNAL inline void observe(const void* address, size_t size, Access access,
                                       const void* caller) {
  if (!in_kernel) return;
  in_kernel = false;
  look(address, size, access, caller);
  in_kernel = true;
}

struct AtomicAccess {
  CUDA_HOST_INTERNAL AtomicAccess(const void* address, size_t size) {
    observe(address, size, kAtomic, __builtin_return_address(0));
    in_kernel = false;
  }
  CUDA_HOST_INTERNAL ~AtomicAccess() { in_kernel = true; }
};

}  // namespace cuda_host

#define CUDA_HOST_HOOK extern "C" __attribute__((used, no_sanitize("thread"))) inline
#define CUDA_HOST_OBSERVE(name, size, access)                                          \
  CUDA_HOST_HOOK void __tsan_##name(void* address) {                                   \
    cuda_host::observe(address, size, cuda_host::access, __builtin_return_address(0)); \
  }
#define CUDA_HOST_OBSERVE_SIZE(size)                   \
  CUDA_HOST_OBSERVE(read##size, size, kRead)           \
  CUDA_HOST_OBSERVE(write##size, size, kWrite)         \
  CUDA_HOST_OBSERVE(unaligned_read##size, size, kRead) \
  CUDA_HOST_OBSERVE(unaligned_write##size, size, kWrite)
CUDA_HOST_OBSERVE_SIZE(1)
CUDA_HOST_OBSERVE_SIZE(2)
CUDA_HOST_OBSERVE_SIZE(4)
CUDA_HOST_OBSERVE_SIZE(8)
CUDA_HOST_OBSERVE_SIZE(16)
CUDA_HOST_HOOK void __tsan_read_range(void* address, unsigned long size) {
  cuda_host::observe(address, size, cuda_host::kRead, __builtin_return_address(0));
}
CUDA_HOST_HOOK void __tsan_write_range(void* address, unsigned long size) {
  cuda_host::observe(address, size, cuda_host::kWrite, __builtin_return_address(0));
}
CUDA_HOST_HOOK void __tsan_init() {}
CUDA_HOST_HOOK void __tsan_func_entry(void*) {}
CUDA_HOST_HOOK void __tsan_func_exit() {}
CUDA_HOST_HOOK void __tsan_vptr_update(void**, void*) {}
CUDA_HOST_HOOK void __tsan_vptr_read(void**) {}
CUDA_HOST_HOOK unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return *address;
}
CUDA_HOST_HOOK unsigned __tsan_atomic32_fetch_add(volatile unsigned* address, unsigned value, int) {
  const unsigned old = *address;
  *address = old + value;
  return old;
}
