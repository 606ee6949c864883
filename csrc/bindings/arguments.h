// What the bindings share: torch's threads as an Executor, tensors as the kernels' plain structs,
// checks.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <atomic>
#include <string_view>

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

// Holds contiguous copies, where needed, as long as the kernel runs.
struct GraphArrays {
  at::Tensor rowptr, member, colptr, ego, slot;
  cpu::Graph graph;

  GraphArrays(const char* op, const at::Tensor& rowptr_, const at::Tensor& member_,
              const at::Tensor& colptr_, const at::Tensor& ego_, const at::Tensor& slot_)
      : rowptr(rowptr_.contiguous()),
        member(member_.contiguous()),
        colptr(colptr_.contiguous()),
        ego(ego_.contiguous()),
        slot(slot_.contiguous()) {
    const auto dtype = rowptr.scalar_type();
    TORCH_CHECK_VALUE(dtype == at::kInt || dtype == at::kLong, op,
                      ": rowptr must be int32 or int64, got ", dtype);
    const int64_t num_egos = rowptr.numel() - 1, num_nodes = colptr.numel() - 1;
    const int64_t num_slots = member.numel();
    const auto check = [&](const char* name, const at::Tensor& array, int64_t size) {
      TORCH_CHECK_VALUE(array.dim() == 1 && array.numel() == size, op, ": ", name,
                        " must have shape [", size, "], got ", array.sizes());
      TORCH_CHECK_VALUE(array.scalar_type() == dtype, op, ": ", name, " is ", array.scalar_type(),
                        ", but rowptr is ", dtype);
    };
    for (const auto& [name, pointers] :
         {std::pair{"rowptr", rowptr}, std::pair{"colptr", colptr}}) {
      TORCH_CHECK_VALUE(pointers.numel() > 0, op, ": ", name, " must have at least one entry");
    }
    check("rowptr", rowptr, num_egos + 1);
    check("member", member, num_slots);
    check("colptr", colptr, num_nodes + 1);
    check("ego", ego, num_slots);
    check("slot", slot, num_slots);
    graph = {num_egos,
             num_nodes,
             num_slots,
             dtype == at::kLong,
             rowptr.const_data_ptr(),
             member.const_data_ptr(),
             colptr.const_data_ptr(),
             ego.const_data_ptr(),
             slot.const_data_ptr()};
    for (const auto& [name, pointers] :
         {std::pair{"rowptr", rowptr}, std::pair{"colptr", colptr}}) {
      const int64_t end = pointers.numel() - 1;
      const int64_t last = dtype == at::kLong ? pointers.const_data_ptr<int64_t>()[end]
                                              : pointers.const_data_ptr<int32_t>()[end];
      TORCH_CHECK_VALUE(last == num_slots, op, ": ", name, " must end with the number of slots, ",
                        num_slots, ", got ", last);
    }
  }

  // For the ops that read a node and its own ego.
  void check_ego_of_every_node(const char* op) const {
    TORCH_CHECK_VALUE(graph.num_egos == graph.num_nodes, op,
                      ": the graph must have an ego for every node, got ", graph.num_egos,
                      " egos and ", graph.num_nodes, " nodes");
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

inline void check_shape(const char* op, const char* name, const at::Tensor& tensor,
                        at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " must have shape ", shape, ", got ",
                    tensor.sizes());
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                             const at::Tensor& other) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == other.scalar_type(), op, ": ", name, " is ",
                    tensor.scalar_type(), ", wanted ", other.scalar_type());
}

}  // namespace dcgnn
