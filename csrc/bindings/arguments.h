// What the CPU bindings share: torch's threads as an Executor, graphs and dtypes as the kernels
// know them.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "bindings/checks.h"
#include "bindings/memory.h"
#include "cpu/types.h"

namespace dcgnn {

// Tasks over torch's threads, in a few ranges for each thread, taken as a thread gets to them: one
// that the machine slows down takes fewer. Kernels cut work into tasks that do not depend on the
// number of threads, so that it does not matter who does which.
class TorchExecutor final : public cpu::Executor {
 public:
  void run(int64_t num_tasks, cpu::RangeBody body) const override {
    constexpr int64_t kRangesPerThread = 8;
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), num_tasks);
    if (threads <= 1 || at::in_parallel_region()) {
      if (num_tasks > 0) body(0, num_tasks);
      return;
    }
    const int64_t ranges = std::min(threads * kRangesPerThread, num_tasks);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t range = next++; range < ranges; range = next++) {
        body(num_tasks * range / ranges, num_tasks * (range + 1) / ranges);
      }
    });
  }
};

// A graph whose pointers end where the slots do.
struct GraphArrays : GraphTensors<cpu::Graph> {
  GraphArrays(const char* op, const at::Tensor& rowptr_, const at::Tensor& member_,
              const at::Tensor& colptr_, const at::Tensor& ego_, const at::Tensor& slot_)
      : GraphTensors(op, rowptr_, member_, colptr_, ego_, slot_) {
    const auto dtype = rowptr.scalar_type();
    for (const auto& [name, array] : named()) {
      TORCH_CHECK_VALUE(array.scalar_type() == dtype, op, ": ", name, " is ", array.scalar_type(),
                        ", but rowptr is ", dtype);
    }
    for (const auto& [name, pointers] :
         {std::pair{"rowptr", &rowptr}, std::pair{"colptr", &colptr}}) {
      const int64_t end = pointers->numel() - 1;
      const int64_t last = graph.wide_index ? pointers->const_data_ptr<int64_t>()[end]
                                            : pointers->const_data_ptr<int32_t>()[end];
      TORCH_CHECK_VALUE(last == graph.num_slots, op, ": ", name,
                        " must end with the number of slots, ", graph.num_slots, ", got ", last);
    }
  }
};

inline cpu::DType kernel_dtype(const char* op, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cpu::DType::kFloat32;
    case at::kDouble:
      return cpu::DType::kFloat64;
    case at::kBFloat16:
      return cpu::DType::kBFloat16;
    default:
      TORCH_CHECK_VALUE(false, op, ": dtype ", tensor.scalar_type(), " is not supported");
  }
}

// float16 has no kernels of its own: it is computed as float32 and rounded at the end.
inline bool is_half(const at::Tensor& tensor) { return tensor.scalar_type() == at::kHalf; }

}  // namespace dcgnn
