// Runs the body of a CUDA kernel on the host: the same .cuh that nvcc compiles, under g++, a fibre
// for each GPU thread. Include it before the .cuh, instead of CUDA's own headers.
//
//   cuda_host::launch(grid, block, [&] { kernel(arguments...); }, seed, dynamic_shared_bytes);
//
// Blocks run one after the other. A thread runs until it waits: at __syncthreads, or at a warp
// function until all lanes of the member mask have come. Between waits the order of the threads is
// that of the seed (0 ascending, 1 descending, others random), and so is the order of the blocks:
// results that change with the seed have a barrier missing. Wrong use of barriers and masks ends
// the program with a message. Three builds find different errors:
//   -fsanitize=address,undefined   indices past the end, misaligned vectors, undefined arithmetic
//   -fsanitize=thread, linked without it   races (cuda_host_races.h)
//   none                           order dependence only
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
// One block at a time, so that static storage is what the threads of a block share.
#define __shared__ static
// Stands for `extern __shared__ type name[]`; filled with 0xff (NaN) for every block.
#define CUDA_HOST_DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(cuda_host::machine().dynamic_shared.get())
// The emulator's own accesses are none of the kernel's.
#define CUDA_HOST_INTERNAL __attribute__((no_sanitize("thread")))

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#define CUDA_HOST_VECTOR(type, name, size2)                                   \
  struct alignas(size2) name##2 { type x, y; };                               \
  struct name##3 { type x, y, z; };                                           \
  struct alignas(16) name##4 { type x, y, z, w; };                            \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUDA_HOST_VECTOR(float, float, 8)
CUDA_HOST_VECTOR(int, int, 8)
CUDA_HOST_VECTOR(unsigned, uint, 8)
CUDA_HOST_VECTOR(double, double, 16)
#undef CUDA_HOST_VECTOR

namespace cuda_host {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 256 * 1024;

enum class State { kRunning, kAtBarrier, kAtWarp, kReturned };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::kRunning;
  unsigned number = 0;  // in its block
  unsigned mask = 0;    // the lanes that a warp function waits for
  const char* waits_in = "";
  uint64_t offered = 0;
  uint64_t received[kWarp] = {};
  void* fake_stack = nullptr;
};

struct Machine {
  dim3 grid, block, block_index;
  std::vector<Thread> threads;
  unsigned count = 0;
  Thread* current = nullptr;
  ucontext_t scheduler;
  std::function<void()> body;
  std::unique_ptr<unsigned char[]> dynamic_shared;
  size_t dynamic_shared_bytes = 0;
  uint64_t interval = 0;                // barriers passed in this launch
  std::vector<uint64_t> warp_interval;  // __syncwarp passed, for each warp
  void* fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

// Whether the code that runs is the kernel's; the race detector looks only then.
inline bool in_kernel = false;

CUDA_HOST_INTERNAL inline Machine& machine() {
  static Machine* instance = new Machine;
  return *instance;
}

CUDA_HOST_INTERNAL inline unsigned block_number() {
  const Machine& m = machine();
  return (m.block_index.z * m.grid.y + m.block_index.y) * m.grid.x + m.block_index.x;
}

[[noreturn]] CUDA_HOST_INTERNAL inline void fail(const char* format, const char* detail = "") {
  Machine& m = machine();
  in_kernel = false;
  std::fprintf(stderr, "cuda_host: ");
  std::fprintf(stderr, format, detail);
  std::fprintf(stderr, " (block %u thread %u)\n", block_number(),
               m.current ? m.current->number : 0);
  std::fflush(nullptr);
  std::_Exit(3);
}

}  // namespace cuda_host

#if defined(__SANITIZE_THREAD__)
#include "cuda_host_races.h"
#else
namespace cuda_host {
struct AtomicAccess {
  AtomicAccess(const void*, size_t) {}
};
inline void forget_accesses() {}
}  // namespace cuda_host
#endif

namespace cuda_host {

// Back to the scheduler until this thread may go on.
CUDA_HOST_INTERNAL inline void wait(State state, const char* function) {
  Machine& m = machine();
  Thread* self = m.current;
  if (self == nullptr) fail("%s outside of a launch", function);
  in_kernel = false;
  self->state = state;
  self->waits_in = function;
#if defined(__SANITIZE_ADDRESS__)
  const bool ends = state == State::kReturned;
  __sanitizer_start_switch_fiber(ends ? nullptr : &self->fake_stack, m.scheduler_stack,
                                 m.scheduler_stack_bytes);
#endif
  swapcontext(&self->context, &m.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#endif
  in_kernel = true;
}

CUDA_HOST_INTERNAL inline void begin_thread() {
  Machine& m = machine();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &m.scheduler_stack, &m.scheduler_stack_bytes);
#endif
  in_kernel = true;
  m.body();
  wait(State::kReturned, "return");
}

CUDA_HOST_INTERNAL inline void resume(Thread& thread) {
  Machine& m = machine();
  m.current = &thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&m.fake_stack, thread.stack.get(), kStackBytes);
#endif
  swapcontext(&m.scheduler, &thread.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(m.fake_stack, nullptr, nullptr);
#endif
}

inline void prepare_thread(Thread& thread, unsigned number) {
  if (!thread.stack) thread.stack.reset(new char[kStackBytes]);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(thread.stack.get(), kStackBytes);
#endif
  thread.number = number;
  thread.state = State::kRunning;
  thread.fake_stack = nullptr;
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = kStackBytes;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, begin_thread, 0);
}

// Lets the lanes of a mask go on when all of them wait; whether any did.
inline bool release_lanes(unsigned warp) {
  Machine& m = machine();
  const unsigned first = warp * kWarp, last = std::min(m.count, first + kWarp);
  bool released = false;
  for (unsigned i = first; i < last; ++i) {
    Thread& thread = m.threads[i];
    if (thread.state != State::kAtWarp) continue;
    m.current = &thread;
    bool complete = true;
    for (unsigned j = first; j < last; ++j) {
      if (!((thread.mask >> (j - first)) & 1)) continue;
      const Thread& other = m.threads[j];
      if (other.state == State::kReturned) {
        fail("%s: the member mask names a lane that has returned", thread.waits_in);
      }
      const bool here = other.state == State::kAtWarp && other.mask == thread.mask;
      if (here && std::strcmp(other.waits_in, thread.waits_in) != 0) {
        fail("%s: another lane of the member mask is in a different function", thread.waits_in);
      }
      complete = complete && here;
    }
    if (!complete) continue;
    for (unsigned j = first; j < last; ++j) {
      if (!((thread.mask >> (j - first)) & 1)) continue;
      for (unsigned k = first; k < last; ++k) {
        m.threads[j].received[k - first] = m.threads[k].offered;
      }
    }
    for (unsigned j = first; j < last; ++j) {
      if ((thread.mask >> (j - first)) & 1) m.threads[j].state = State::kRunning;
    }
    if (std::strcmp(thread.waits_in, "__syncwarp") == 0) ++m.warp_interval[warp];
    released = true;
  }
  return released;
}

inline unsigned count_in(State state) {
  Machine& m = machine();
  return unsigned(std::count_if(m.threads.begin(), m.threads.begin() + m.count,
                                [state](const Thread& t) { return t.state == state; }));
}

// Runs the threads of one block to their end.
inline void run_block(const std::function<void(std::vector<unsigned>&)>& reorder) {
  Machine& m = machine();
  std::vector<unsigned> order(m.count);
  for (unsigned i = 0; i < m.count; ++i) prepare_thread(m.threads[i], order[i] = i);
  while (count_in(State::kReturned) < m.count) {
    reorder(order);
    for (unsigned i : order) {
      if (m.threads[i].state == State::kRunning) resume(m.threads[i]);
    }
    bool released = false;
    for (unsigned warp = 0; warp * kWarp < m.count; ++warp) released |= release_lanes(warp);
    const unsigned waiting = count_in(State::kAtBarrier), gone = count_in(State::kReturned);
    if (released || gone == m.count) continue;
    for (unsigned i = 0; i < m.count; ++i) {
      if (m.threads[i].state == State::kAtWarp) {
        m.current = &m.threads[i];
        fail("%s: a lane of the member mask waits elsewhere", m.threads[i].waits_in);
      }
      if (m.threads[i].state == State::kAtBarrier && waiting < m.count) {
        m.current = &m.threads[i];
        fail("%s is not reached by every thread of the block", m.threads[i].waits_in);
      }
    }
    ++m.interval;
    for (unsigned i = 0; i < m.count; ++i) m.threads[i].state = State::kRunning;
  }
}

inline void launch(dim3 grid, dim3 block, std::function<void()> body, unsigned seed = 0,
                   size_t dynamic_shared_bytes = 0) {
  Machine& m = machine();
  std::mt19937 random(seed);
  const auto reorder = [&](std::vector<unsigned>& order) {
    if (seed > 1) std::shuffle(order.begin(), order.end(), random);
    if (seed == 1) std::sort(order.begin(), order.end(), std::greater<unsigned>());
  };
  m.grid = grid;
  m.block = block;
  m.count = block.x * block.y * block.z;
  m.body = std::move(body);
  m.interval = 0;
  m.warp_interval.assign((m.count + kWarp - 1) / kWarp, 0);
  if (m.threads.size() < m.count) m.threads.resize(m.count);
  m.dynamic_shared.reset(new unsigned char[dynamic_shared_bytes]);
  m.dynamic_shared_bytes = dynamic_shared_bytes;
  forget_accesses();
  std::vector<unsigned> blocks(size_t(grid.x) * grid.y * grid.z);
  for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
  reorder(blocks);
  for (unsigned i : blocks) {
    m.block_index = dim3(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));
    std::memset(m.dynamic_shared.get(), 0xff, dynamic_shared_bytes);
    ++m.interval;
    run_block(reorder);
  }
  m.current = nullptr;
}

// What threadIdx.x and its like read.
template <int kAxis>
struct ThreadIndex {
  CUDA_HOST_INTERNAL operator unsigned() const {
    const Machine& m = machine();
    const unsigned number = m.current->number;
    if (kAxis == 0) return number % m.block.x;
    if (kAxis == 1) return number / m.block.x % m.block.y;
    return number / (m.block.x * m.block.y);
  }
};
struct ThreadIndices {
  ThreadIndex<0> x;
  ThreadIndex<1> y;
  ThreadIndex<2> z;
};

CUDA_HOST_INTERNAL inline unsigned lane() { return machine().current->number % kWarp; }

// Offers a value to the lanes of the mask; afterwards theirs are in received.
template <class T>
CUDA_HOST_INTERNAL void exchange(const char* function, unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a lane exchanges at most 8 bytes");
  if (!((mask >> lane()) & 1)) fail("%s: the thread is not in its own member mask", function);
  Thread* self = machine().current;
  self->mask = mask;
  self->offered = 0;
  std::memcpy(&self->offered, &value, sizeof(T));
  wait(State::kAtWarp, function);
}

template <class T>
CUDA_HOST_INTERNAL T from_lane(const char* function, unsigned source) {
  const Thread* self = machine().current;
  if (!((self->mask >> source) & 1)) fail("%s: from a lane outside of the member mask", function);
  T value;
  std::memcpy(&value, &self->received[source], sizeof(T));
  return value;
}

template <class T>
CUDA_HOST_INTERNAL T shuffle(const char* function, unsigned mask, T value, int source, int width) {
  exchange(function, mask, value);
  const int first = int(lane()) / width * width;
  const bool inside = source >= first && source < first + width;
  return from_lane<T>(function, inside ? unsigned(source) : lane());
}

CUDA_HOST_INTERNAL inline unsigned ballot(const char* function, unsigned mask, bool vote) {
  exchange(function, mask, uint64_t(vote));
  unsigned ayes = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i) & 1) ayes |= unsigned(machine().current->received[i] & 1) << i;
  }
  return ayes;
}

// One thread runs at a time: only the race detector must know that the access is atomic.
template <class T, class Change>
CUDA_HOST_INTERNAL T atomic(T* address, Change change) {
  AtomicAccess scope(address, sizeof(T));
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace cuda_host

static cuda_host::ThreadIndices threadIdx;
#define blockIdx (cuda_host::machine().block_index)
#define blockDim (cuda_host::machine().block)
#define gridDim (cuda_host::machine().grid)
constexpr int warpSize = cuda_host::kWarp;

inline void __syncthreads() { cuda_host::wait(cuda_host::State::kAtBarrier, "__syncthreads"); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_host::exchange("__syncwarp", mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int first = int(cuda_host::lane()) / width * width;
  return cuda_host::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
  return cuda_host::shuffle("__shfl_xor_sync", mask, value, int(cuda_host::lane()) ^ bits, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  return cuda_host::shuffle("__shfl_up_sync", mask, value, int(cuda_host::lane()) - int(delta),
                            width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  return cuda_host::shuffle("__shfl_down_sync", mask, value, int(cuda_host::lane()) + int(delta),
                            width);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  return cuda_host::ballot("__ballot_sync", mask, vote != 0);
}
inline int __any_sync(unsigned mask, int vote) {
  return cuda_host::ballot("__any_sync", mask, vote != 0) != 0;
}
inline int __all_sync(unsigned mask, int vote) {
  return cuda_host::ballot("__all_sync", mask, vote == 0) == 0;
}

template <class T>
T atomicAdd(T* address, T value) {
  return cuda_host::atomic(address, [=](T old) { return T(old + value); });
}
template <class T>
T atomicMin(T* address, T value) {
  return cuda_host::atomic(address, [=](T old) { return std::min(old, value); });
}
template <class T>
T atomicMax(T* address, T value) {
  return cuda_host::atomic(address, [=](T old) { return std::max(old, value); });
}
template <class T>
T atomicExch(T* address, T value) {
  return cuda_host::atomic(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  return cuda_host::atomic(address, [=](T old) { return old == expected ? value : old; });
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}
using std::max;
using std::min;
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
