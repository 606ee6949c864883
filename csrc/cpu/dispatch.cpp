// Chooses the instruction set, once. DCGNN_X86_VARIANTS: the kernels were also compiled for AVX2
// and AVX-512.
#include <cstdlib>
#include <cstring>
#include <new>

#include "types.h"

namespace dcgnn::cpu {

namespace baseline {
const KernelTable& table();
}
#ifdef DCGNN_X86_VARIANTS
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
#endif

namespace {

const KernelTable& choose() {
#ifdef DCGNN_X86_VARIANTS
  const char* asked = std::getenv("DCGNN_CPU_ISA");
  const bool allow_avx2 = asked == nullptr || std::strcmp(asked, "baseline") != 0;
  const bool allow_avx512 = allow_avx2 && (asked == nullptr || std::strcmp(asked, "avx2") != 0);
  __builtin_cpu_init();
  if (allow_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("fma")) {
    return avx512::table();
  }
  if (allow_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return avx2::table();
  }
#endif
  return baseline::table();
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

WorkingMemory& working_memory() {
  static WorkingMemory memory = {[](int64_t bytes, void** handle) {
                                   void* data = std::aligned_alloc(64, static_cast<size_t>(bytes));
                                   if (data == nullptr) throw std::bad_alloc();
                                   return *handle = data;
                                 },
                                 [](void* handle) { std::free(handle); }};
  return memory;
}

int64_t& streamed_bytes() {
  static int64_t bytes = int64_t{1} << 26;
  return bytes;
}

}  // namespace dcgnn::cpu
