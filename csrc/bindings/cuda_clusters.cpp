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

void check_clusters(const char* op, const CudaGraph& arrays, const at::Tensor& assign,
                    const at::Tensor& clusters) {
  TORCH_CHECK_VALUE(clusters.dim() == 3, op, ": clusters must have shape [egos, K, F], got ",
                    clusters.sizes());
  const cuda::Graph& graph = arrays.graph;
  check_cuda(op, "clusters", clusters, {graph.num_egos, clusters.size(1), clusters.size(2)},
             clusters);
  check_cuda(op, "assign", assign, {graph.num_slots, clusters.size(1)}, clusters);
}

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
  check_clusters(op, arrays, assign, clusters);
  return launch_forward(op, arrays, assign, clusters, {});
}

std::tuple<at::Tensor, at::Tensor> cluster_scatter_backward(
    const at::Tensor& grad, const at::Tensor& assign, const at::Tensor& clusters,
    const at::Tensor& rowptr, const at::Tensor& member, const at::Tensor& colptr,
    const at::Tensor& ego, const at::Tensor& slot) {
  const char* op = "cluster_scatter_backward";
  const c10::cuda::CUDAGuard guard(cuda_device(op, clusters));
  const CudaGraph arrays(op, clusters, rowptr, member, colptr, ego, slot);
  check_clusters(op, arrays, assign, clusters);
  check_cuda(op, "grad", grad, {arrays.graph.num_nodes, clusters.size(2)}, grad);
  return launch_backward(op, arrays, grad, assign, clusters, {});
}

// What node_update and its backward have in common: checked and contiguous.
struct DenseArguments {
  at::Tensor global_assign, global_message;
  at::Tensor x_factor, global_factor, local_factor, ego_factor;

  void prepare(const char* op, const at::Tensor& message) {
    TORCH_CHECK_VALUE(global_assign.dim() == 2, op, ": global_assign must have shape [N, K], got ",
                      global_assign.sizes());
    const int64_t num_nodes = message.size(0), num_global = global_assign.size(1);
    check_cuda(op, "global_assign", global_assign, {num_nodes, num_global}, message);
    check_cuda(op, "global_message", global_message, {num_global, message.size(2)}, message);
    global_assign = global_assign.contiguous();
    global_message = global_message.contiguous();
    for (at::Tensor* factor : {&x_factor, &global_factor, &local_factor, &ego_factor}) {
      *factor = factor->to(wide_dtype(message)).contiguous();
      TORCH_CHECK_VALUE(factor->sizes() == at::IntArrayRef{num_nodes}, op,
                        ": a factor must have shape [", num_nodes, "], got ", factor->sizes());
      TORCH_CHECK_VALUE(factor->device() == message.device(), op, ": a factor is on ",
                        factor->device(), ", wanted ", message.device());
    }
  }
};

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
  check_clusters(op, arrays, assign, message);
  check_cuda(op, "x", x_, {message.size(0), message.size(2)}, message);
  DenseArguments dense{global_assign, global_message, x_factor,
                       global_factor, local_factor,   ego_factor};
  dense.prepare(op, message);
  const at::Tensor x = x_.contiguous();
  const cuda::NodeUpdate update{
      dense.global_assign.size(1),          x.const_data_ptr(),
      dense.global_assign.const_data_ptr(), dense.global_message.const_data_ptr(),
      dense.ego_factor.const_data_ptr(),    dense.x_factor.const_data_ptr(),
      dense.global_factor.const_data_ptr(), dense.local_factor.const_data_ptr(),
      cuda_activation(op, activation)};
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
  check_clusters(op, arrays, assign, message);
  check_cuda(op, "grad", grad_, {message.size(0), message.size(2)}, grad_);
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
