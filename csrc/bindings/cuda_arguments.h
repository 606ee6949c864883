// What the CUDA bindings share: checks of tensors on one device, and tensors as the kernels' plain
// structs. Values are not checked: reading them would wait for the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <string_view>

#include "cuda/types.h"

namespace dcgnn {

inline cuda::DType cuda_dtype(const char* op, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cuda::DType::kFloat32;
    case at::kDouble:
      return cuda::DType::kFloat64;
    case at::kHalf:
      return cuda::DType::kFloat16;
    case at::kBFloat16:
      return cuda::DType::kBFloat16;
    default:
      TORCH_CHECK_VALUE(false, op, ": dtype ", tensor.scalar_type(), " is not supported");
  }
}

// Sums, factors and workspaces: double for float64, float for everything else.
inline at::ScalarType wide_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline cuda::Activation cuda_activation(const char* op, std::string_view name) {
  if (name == "none") return cuda::Activation::kNone;
  if (name == "relu") return cuda::Activation::kRelu;
  TORCH_CHECK_VALUE(name == "tanh", op, ": activation must be none, relu or tanh, got ", name);
  return cuda::Activation::kTanh;
}

// The device that a call runs on: that of its clusters.
inline c10::Device cuda_device(const char* op, const at::Tensor& clusters) {
  TORCH_CHECK_VALUE(clusters.is_cuda(), op, ": clusters is on ", clusters.device(),
                    ", but another argument is on a CUDA device");
  return clusters.device();
}

// Shape, dtype and device of one tensor against those of another.
inline void check_cuda(const char* op, const char* name, const at::Tensor& tensor,
                       at::IntArrayRef shape, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": ", name, " is on ", tensor.device(),
                    ", wanted ", like.device());
  TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), op, ": ", name, " is ",
                    tensor.scalar_type(), ", wanted ", like.scalar_type());
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " must have shape ", shape, ", got ",
                    tensor.sizes());
}

// Holds contiguous copies, where needed, as long as kernels are being launched.
struct CudaGraph {
  at::Tensor rowptr, member, colptr, ego, slot;
  cuda::Graph graph;

  CudaGraph(const char* op, const at::Tensor& device_of, const at::Tensor& rowptr_,
            const at::Tensor& member_, const at::Tensor& colptr_, const at::Tensor& ego_,
            const at::Tensor& slot_)
      : rowptr(rowptr_.contiguous()),
        member(member_.contiguous()),
        colptr(colptr_.contiguous()),
        ego(ego_.contiguous()),
        slot(slot_.contiguous()) {
    const auto dtype = rowptr.scalar_type();
    TORCH_CHECK_VALUE(dtype == at::kInt || dtype == at::kLong, op,
                      ": rowptr must be int32 or int64, got ", dtype);
    TORCH_CHECK_VALUE(rowptr.device() == device_of.device(), op, ": rowptr is on ", rowptr.device(),
                      ", wanted ", device_of.device());
    TORCH_CHECK_VALUE(rowptr.dim() == 1 && rowptr.numel() > 0 && colptr.numel() > 0, op,
                      ": rowptr and colptr must have at least one entry");
    const int64_t num_egos = rowptr.numel() - 1, num_nodes = colptr.numel() - 1;
    const int64_t num_slots = member.numel();
    check_cuda(op, "member", member, {num_slots}, rowptr);
    check_cuda(op, "colptr", colptr, {num_nodes + 1}, rowptr);
    check_cuda(op, "ego", ego, {num_slots}, rowptr);
    check_cuda(op, "slot", slot, {num_slots}, rowptr);
    graph = {num_egos,
             num_nodes,
             num_slots,
             dtype == at::kLong,
             rowptr.const_data_ptr(),
             member.const_data_ptr(),
             colptr.const_data_ptr(),
             ego.const_data_ptr(),
             slot.const_data_ptr()};
  }

  // For the ops that read a node and its own ego.
  void check_ego_of_every_node(const char* op) const {
    TORCH_CHECK_VALUE(graph.num_egos == graph.num_nodes, op,
                      ": the graph must have an ego for every node, got ", graph.num_egos,
                      " egos and ", graph.num_nodes, " nodes");
  }
};

}  // namespace dcgnn
