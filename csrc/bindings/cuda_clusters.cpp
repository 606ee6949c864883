// dcgnn::cluster_scatter and dcgnn::node_update on CUDA, with their backwards: on the current
// stream of the tensors' device. A launch that fails is a Python exception.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include <tuple>

#include "bindings/cuda_arguments.h"
#include "cuda/launch.h"

namespace dcgnn {
namespace {

// The caching allocator keeps memory of the current stream until its kernels are done.
at::Tensor workspace_like(const at::Tensor& tensor, int64_t bytes) {
  return at::empty({bytes}, tensor.options().dtype(at::kByte));
}

at::Tensor launch_forward(const char* op, const CudaGraph& arrays, const at::Tensor& assign_,
                          const at::Tensor& clusters_, const cuda::NodeUpdate& update) {
  const at::Tensor assign = assign_.contiguous(), clusters = clusters_.contiguous();
  at::Tensor out = at::empty({arrays.graph.num_nodes, clusters.size(2)}, clusters.options());
  cuda::ScatterForward call{cuda_dtype(op, clusters),
                            arrays.graph,
                            clusters.size(1),
                            clusters.size(2),
                            assign.const_data_ptr(),
                            clusters.const_data_ptr(),
                            update,
                            out.mutable_data_ptr(),
                            nullptr};
  const at::Tensor workspace = workspace_like(out, cuda::forward_workspace_bytes(call));
  call.workspace = workspace.mutable_data_ptr();
  C10_CUDA_CHECK(cuda::cluster_scatter(call, c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<at::Tensor, at::Tensor> launch_backward(const char* op, const CudaGraph& arrays,
                                                   const at::Tensor& grad_,
                                                   const at::Tensor& assign_,
                                                   const at::Tensor& clusters_,
                                                   const cuda::NodeUpdate& update) {
  const at::Tensor grad = grad_.to(clusters_.scalar_type()).contiguous();
  const at::Tensor assign = assign_.contiguous(), clusters = clusters_.contiguous();
  at::Tensor grad_assign = at::empty_like(assign), grad_clusters = at::empty_like(clusters);
  cuda::ScatterBackward call{cuda_dtype(op, clusters),
                             arrays.graph,
                             clusters.size(1),
                             clusters.size(2),
                             grad.const_data_ptr(),
                             assign.const_data_ptr(),
                             clusters.const_data_ptr(),
                             update,
                             grad_assign.mutable_data_ptr(),
                             grad_clusters.mutable_data_ptr(),
                             nullptr};
  const at::Tensor workspace = workspace_like(grad, cuda::backward_workspace_bytes(call));
  call.workspace = workspace.mutable_data_ptr();
  C10_CUDA_CHECK(cuda::cluster_scatter_backward(call, c10::cuda::getCurrentCUDAStream()));
  return {grad_assign, grad_clusters};
}

at::Tensor cluster_scatter(const at::Tensor& assign, const at::Tensor& clusters,
                           const at::Tensor& rowptr, const at::Tensor& member,
                           const at::Tensor& colptr, const at::Tensor& ego,
                           const at::Tensor& slot) {
  const char* op = "cluster_scatter";
  const c10::cuda::CUDAGuard guard(cuda_device(op, clusters));
  const CudaGraph arrays(op, clusters, rowptr, member, colptr, ego, slot);
  check_scatter(op, arrays.graph, assign, clusters);
  return launch_forward(op, arrays, assign, clusters, {});
}

std::tuple<at::Tensor, at::Tensor> cluster_scatter_backward(
    const at::Tensor& grad, const at::Tensor& assign, const at::Tensor& clusters,
    const at::Tensor& rowptr, const at::Tensor& member, const at::Tensor& colptr,
    const at::Tensor& ego, const at::Tensor& slot) {
  const char* op = "cluster_scatter_backward";
  const c10::cuda::CUDAGuard guard(cuda_device(op, clusters));
  const CudaGraph arrays(op, clusters, rowptr, member, colptr, ego, slot);
  check_scatter(op, arrays.graph, assign, clusters);
  check_same_device(op, "grad", grad, clusters);
  check_shape(op, "grad", grad, {arrays.graph.num_nodes, clusters.size(2)});
  return launch_backward(op, arrays, grad, assign, clusters, {});
}

at::Tensor node_update(const at::Tensor& x_, const at::Tensor& global_assign,
                       const at::Tensor& global_message, const at::Tensor& assign,
                       const at::Tensor& message, const at::Tensor& x_factor,
                       const at::Tensor& global_factor, const at::Tensor& local_factor,
                       const at::Tensor& ego_factor, const at::Tensor& rowptr,
                       const at::Tensor& member, const at::Tensor& colptr, const at::Tensor& ego,
                       const at::Tensor& slot, std::string_view activation) {
  const char* op = "node_update";
  const c10::cuda::CUDAGuard guard(cuda_device(op, message));
  const CudaGraph arrays(op, message, rowptr, member, colptr, ego, slot);
  arrays.check_ego_of_every_node(op);
  check_scatter(op, arrays.graph, assign, message);
  check_like(op, "x", x_, {message.size(0), message.size(2)}, message);
  DenseArguments dense{global_assign, global_message, x_factor,
                       global_factor, local_factor,   ego_factor};
  dense.prepare(op, message);
  const at::Tensor x = x_.contiguous();
  const auto update =
      dense.update<cuda::NodeUpdate>(x, parse_activation<cuda::Activation>(op, activation));
  return launch_forward(op, arrays, assign, message, update);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> node_update_backward(
    const at::Tensor& grad_, const at::Tensor& global_assign, const at::Tensor& global_message,
    const at::Tensor& assign, const at::Tensor& message, const at::Tensor& x_factor,
    const at::Tensor& global_factor, const at::Tensor& local_factor, const at::Tensor& ego_factor,
    const at::Tensor& rowptr, const at::Tensor& member, const at::Tensor& colptr,
    const at::Tensor& ego, const at::Tensor& slot) {
  const char* op = "node_update_backward";
  const c10::cuda::CUDAGuard guard(cuda_device(op, message));
  const CudaGraph arrays(op, message, rowptr, member, colptr, ego, slot);
  arrays.check_ego_of_every_node(op);
  check_scatter(op, arrays.graph, assign, message);
  check_same_device(op, "grad", grad_, message);
  check_shape(op, "grad", grad_, {message.size(0), message.size(2)});
  DenseArguments dense{global_assign, global_message, x_factor,
                       global_factor, local_factor,   ego_factor};
  dense.prepare(op, message);
  cuda::NodeUpdate update;
  update.ego_factor = dense.ego_factor.const_data_ptr();
  update.local_factor = dense.local_factor.const_data_ptr();
  auto [grad_assign, grad_message] = launch_backward(op, arrays, grad_, assign, message, update);
  // The dense part is two matrix products with few columns: cuBLAS, in the dtype of the sums.
  const auto dtype = message.scalar_type(), wide = wide_dtype(message);
  const at::Tensor grad = grad_.to(wide);
  const at::Tensor scaled = at::mul(dense.global_factor.unsqueeze(1), grad);
  return {at::mul(dense.x_factor.unsqueeze(1), grad).to(dtype),
          at::mm(scaled, dense.global_message.to(wide).t()).to(dtype),
          at::mm(dense.global_assign.to(wide).t(), scaled).to(dtype), grad_assign, grad_message};
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CUDA, library) {
  library.impl("cluster_scatter", &cluster_scatter);
  library.impl("cluster_scatter_backward", &cluster_scatter_backward);
  library.impl("node_update", &node_update);
  library.impl("node_update_backward", &node_update_backward);
}

}  // namespace dcgnn
