// dcgnn::cluster_scatter and dcgnn::local_centroids on the CPU, with their backwards.
#include <torch/library.h>

#include <tuple>

#include "bindings/arguments.h"

namespace dcgnn {
namespace {

at::Tensor cluster_scatter(const at::Tensor& assign_, const at::Tensor& clusters_,
                           const at::Tensor& rowptr, const at::Tensor& member,
                           const at::Tensor& colptr, const at::Tensor& ego,
                           const at::Tensor& slot) {
  const char* op = "cluster_scatter";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  check_scatter(op, arrays.graph, assign_, clusters_);
  if (is_half(clusters_)) {
    return cluster_scatter(assign_.to(at::kFloat), clusters_.to(at::kFloat), rowptr, member, colptr,
                           ego, slot)
        .to(at::kHalf);
  }
  const at::Tensor assign = assign_.contiguous(), clusters = clusters_.contiguous();
  at::Tensor out = empty_output({arrays.graph.num_nodes, clusters.size(2)}, clusters.options());
  cpu::kernels().cluster_scatter({kernel_dtype(op, clusters),
                                  &arrays.graph,
                                  clusters.size(1),
                                  clusters.size(2),
                                  assign.const_data_ptr(),
                                  clusters.const_data_ptr(),
                                  {},
                                  out.mutable_data_ptr()},
                                 TorchExecutor());
  return out;
}

std::tuple<at::Tensor, at::Tensor> cluster_scatter_backward(
    const at::Tensor& grad_, const at::Tensor& assign_, const at::Tensor& clusters_,
    const at::Tensor& rowptr, const at::Tensor& member, const at::Tensor& colptr,
    const at::Tensor& ego, const at::Tensor& slot) {
  const char* op = "cluster_scatter_backward";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  check_scatter(op, arrays.graph, assign_, clusters_);
  check_shape(op, "grad", grad_, {arrays.graph.num_nodes, clusters_.size(2)});
  if (is_half(clusters_)) {
    auto [grad_assign, grad_clusters] =
        cluster_scatter_backward(grad_.to(at::kFloat), assign_.to(at::kFloat),
                                 clusters_.to(at::kFloat), rowptr, member, colptr, ego, slot);
    return {grad_assign.to(at::kHalf), grad_clusters.to(at::kHalf)};
  }
  const at::Tensor grad = grad_.to(clusters_.scalar_type()).contiguous();
  const at::Tensor assign = assign_.contiguous(), clusters = clusters_.contiguous();
  at::Tensor grad_assign = empty_output(assign.sizes(), assign.options());
  at::Tensor grad_clusters = empty_output(clusters.sizes(), clusters.options());
  cpu::kernels().cluster_scatter_backward({kernel_dtype(op, clusters),
                                           &arrays.graph,
                                           clusters.size(1),
                                           clusters.size(2),
                                           grad.const_data_ptr(),
                                           assign.const_data_ptr(),
                                           clusters.const_data_ptr(),
                                           {},
                                           grad_assign.mutable_data_ptr(),
                                           grad_clusters.mutable_data_ptr(),
                                           nullptr,
                                           nullptr,
                                           nullptr},
                                          TorchExecutor());
  return {grad_assign, grad_clusters};
}

// What node_update and its backward have in common.
struct UpdateArguments {
  const char* op;
  GraphArrays arrays;
  at::Tensor assign, message;
  DenseArguments dense;

  void prepare() {
    arrays.check_ego_of_every_node(op);
    check_scatter(op, arrays.graph, assign, message);
    dense.prepare(op, message);
    for (at::Tensor* tensor : {&dense.global_assign, &dense.global_message, &assign, &message}) {
      *tensor = is_half(*tensor) ? tensor->to(at::kFloat).contiguous() : tensor->contiguous();
    }
  }
  // x may be any array where only gradients are wanted: it marks that there is a dense part.
  cpu::NodeUpdate update(const at::Tensor& x, cpu::Activation activation) const {
    return dense.update<cpu::NodeUpdate>(x, activation);
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
  UpdateArguments arguments{
      op,
      GraphArrays(op, rowptr, member, colptr, ego, slot),
      assign,
      message,
      {global_assign, global_message, x_factor, global_factor, local_factor, ego_factor}};
  check_same_dtype(op, "x", x_, message);
  arguments.prepare();
  const at::Tensor& clusters = arguments.message;
  const at::Tensor x = x_.to(clusters.scalar_type()).contiguous();
  check_shape(op, "x", x, {clusters.size(0), clusters.size(2)});
  at::Tensor out = empty_output(x.sizes(), x.options());
  if (x.numel() > 0) {
    cpu::kernels().cluster_scatter(
        {kernel_dtype(op, x), &arguments.arrays.graph, clusters.size(1), clusters.size(2),
         arguments.assign.const_data_ptr(), clusters.const_data_ptr(),
         arguments.update(x, parse_activation<cpu::Activation>(op, activation)),
         out.mutable_data_ptr()},
        TorchExecutor());
  }
  return out.to(x_.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> node_update_backward(
    const at::Tensor& grad_, const at::Tensor& global_assign, const at::Tensor& global_message,
    const at::Tensor& assign, const at::Tensor& message, const at::Tensor& x_factor,
    const at::Tensor& global_factor, const at::Tensor& local_factor, const at::Tensor& ego_factor,
    const at::Tensor& rowptr, const at::Tensor& member, const at::Tensor& colptr,
    const at::Tensor& ego, const at::Tensor& slot) {
  const char* op = "node_update_backward";
  UpdateArguments arguments{
      op,
      GraphArrays(op, rowptr, member, colptr, ego, slot),
      assign,
      message,
      {global_assign, global_message, x_factor, global_factor, local_factor, ego_factor}};
  arguments.prepare();
  const at::Tensor& clusters = arguments.message;
  const at::Tensor grad = grad_.to(clusters.scalar_type()).contiguous();
  check_shape(op, "grad", grad, {clusters.size(0), clusters.size(2)});
  const auto like = [](const at::Tensor& tensor) {
    return empty_output(tensor.sizes(), tensor.options());
  };
  at::Tensor grad_x = like(grad), grad_global_assign = like(arguments.dense.global_assign);
  at::Tensor grad_global_message = like(arguments.dense.global_message);
  at::Tensor grad_assign = like(arguments.assign), grad_message = like(clusters);
  if (grad.numel() > 0) {
    cpu::kernels().cluster_scatter_backward(
        {kernel_dtype(op, grad), &arguments.arrays.graph, clusters.size(1), clusters.size(2),
         grad.const_data_ptr(), arguments.assign.const_data_ptr(), clusters.const_data_ptr(),
         arguments.update(grad, cpu::Activation::kNone), grad_assign.mutable_data_ptr(),
         grad_message.mutable_data_ptr(), grad_x.mutable_data_ptr(),
         grad_global_assign.mutable_data_ptr(), grad_global_message.mutable_data_ptr()},
        TorchExecutor());
  } else {
    for (at::Tensor* tensor : {&grad_global_assign, &grad_global_message, &grad_assign})
      tensor->zero_();
  }
  const auto dtype = message.scalar_type();
  return {grad_x.to(dtype), grad_global_assign.to(dtype), grad_global_message.to(dtype),
          grad_assign.to(dtype), grad_message.to(dtype)};
}

at::Tensor local_centroids(const at::Tensor& z_, const at::Tensor& rowptr, const at::Tensor& member,
                           const at::Tensor& colptr, const at::Tensor& ego, const at::Tensor& slot,
                           int64_t num_local) {
  const char* op = "local_centroids";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  arrays.check_ego_of_every_node(op);
  TORCH_CHECK_VALUE(z_.dim() == 2, op, ": z must have shape [N, F], got ", z_.sizes());
  TORCH_CHECK_VALUE(num_local >= 1, op, ": num_local must be at least 1, got ", num_local);
  check_shape(op, "z", z_, {arrays.graph.num_nodes, z_.size(1)});
  if (is_half(z_)) {
    return local_centroids(z_.to(at::kFloat), rowptr, member, colptr, ego, slot, num_local)
        .to(at::kHalf);
  }
  const at::Tensor z = z_.contiguous();
  at::Tensor centroids = empty_output({z.size(0), num_local, z.size(1)}, z.options());
  cpu::kernels().local_centroids({kernel_dtype(op, z), &arrays.graph, num_local, z.size(1),
                                  z.const_data_ptr(), centroids.mutable_data_ptr()},
                                 TorchExecutor());
  return centroids;
}

at::Tensor local_centroids_backward(const at::Tensor& grad_, const at::Tensor& rowptr,
                                    const at::Tensor& member, const at::Tensor& colptr,
                                    const at::Tensor& ego, const at::Tensor& slot,
                                    int64_t num_local) {
  const char* op = "local_centroids_backward";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  arrays.check_ego_of_every_node(op);
  TORCH_CHECK_VALUE(grad_.dim() == 3, op, ": grad must have shape [N, K, F], got ", grad_.sizes());
  check_shape(op, "grad", grad_, {arrays.graph.num_nodes, num_local, grad_.size(2)});
  if (is_half(grad_)) {
    return local_centroids_backward(grad_.to(at::kFloat), rowptr, member, colptr, ego, slot,
                                    num_local)
        .to(at::kHalf);
  }
  const at::Tensor grad = grad_.contiguous();
  at::Tensor grad_z = empty_output({grad.size(0), grad.size(2)}, grad.options());
  cpu::kernels().local_centroids_backward(
      {kernel_dtype(op, grad), &arrays.graph, num_local, grad.size(2), grad.const_data_ptr(),
       grad_z.mutable_data_ptr()},
      TorchExecutor());
  return grad_z;
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) {
  library.impl("cluster_scatter", &cluster_scatter);
  library.impl("cluster_scatter_backward", &cluster_scatter_backward);
  library.impl("node_update", &node_update);
  library.impl("node_update_backward", &node_update_backward);
  library.impl("local_centroids", &local_centroids);
  library.impl("local_centroids_backward", &local_centroids_backward);
}

}  // namespace dcgnn
