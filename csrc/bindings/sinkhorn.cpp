// dcgnn::local_sinkhorn and dcgnn::global_sinkhorn on the CPU, with their backwards.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/arguments.h"

namespace dcgnn {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor>;
using Solution = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

cpu::CostScale parse_cost_scale(const char* op, std::string_view name) {
  if (name == "none") return cpu::CostScale::kNone;
  if (name == "mean") return cpu::CostScale::kMean;
  TORCH_CHECK_VALUE(name == "max", op, ": cost_scale must be none, mean or max, got ",
                    std::string(name));
  return cpu::CostScale::kMax;
}

cpu::Transport make_transport(const char* op, const at::Tensor& centroids, double lam,
                              std::optional<int64_t> num_iters, std::string_view cost_scale,
                              double tol, int64_t max_iters) {
  TORCH_CHECK_VALUE(!num_iters.has_value() || *num_iters >= 1, op,
                    ": num_iters must be at least 1, or None");
  TORCH_CHECK_VALUE(centroids.size(-2) >= 1, op, ": centroids must hold at least one cluster-node");
  return {centroids.size(-2),
          centroids.size(-1),
          lam,
          num_iters.value_or(0),
          parse_cost_scale(op, cost_scale),
          tol,
          max_iters};
}

// The one place where the local and the global op differ: a graph, or one problem of all nodes.
struct Problems {
  const char* op;
  const GraphArrays* arrays;  // null: global
  bool local() const { return arrays != nullptr; }
  const cpu::Graph* graph() const { return local() ? &arrays->graph : nullptr; }

  void check(const at::Tensor& z, const at::Tensor& centroids) const {
    TORCH_CHECK_VALUE(z.dim() == 2, op, ": z must have shape [N, F], got ", z.sizes());
    check_same_dtype(op, "centroids", centroids, z);
    if (local()) {
      check_shape(op, "z", z, {arrays->graph.num_nodes, z.size(1)});
      TORCH_CHECK_VALUE(centroids.dim() == 3, op, ": centroids must have shape [N, K, F], got ",
                        centroids.sizes());
      check_shape(op, "centroids", centroids, {z.size(0), centroids.size(1), z.size(1)});
    } else {
      TORCH_CHECK_VALUE(centroids.dim() == 2, op, ": centroids must have shape [K, F], got ",
                        centroids.sizes());
      check_shape(op, "centroids", centroids, {centroids.size(0), z.size(1)});
    }
  }
  int64_t num_slots(const at::Tensor& z) const {
    return local() ? arrays->graph.num_slots : z.size(0);
  }
  at::DimVector potentials_shape(const at::Tensor& z, const cpu::Transport& transport) const {
    const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
    if (local()) return {z.size(0), steps, transport.num_clusters};
    return {steps, transport.num_clusters};
  }
};

// The kernel saw a cost that is not finite: says whose fault it is.
[[noreturn]] void raise_not_finite(const char* op, const at::Tensor& z,
                                   const at::Tensor& centroids) {
  TORCH_CHECK_VALUE(at::isfinite(z).all().item<bool>(), op, ": z contains NaN or infinity");
  TORCH_CHECK_VALUE(at::isfinite(centroids).all().item<bool>(), op,
                    ": centroids contains NaN or infinity");
  TORCH_CHECK_VALUE(false, op, ": squared distances between z and centroids overflow ",
                    z.scalar_type());
}

Solution forward(const Problems& problems, const at::Tensor& z_, const at::Tensor& centroids_,
                 double lam, std::optional<int64_t> num_iters, std::string_view cost_scale,
                 double tol, int64_t max_iters) {
  const char* op = problems.op;
  problems.check(z_, centroids_);
  if (is_half(z_)) {
    auto [assign, clusters, potentials] =
        forward(problems, z_.to(at::kFloat), centroids_.to(at::kFloat), lam, num_iters, cost_scale,
                tol, max_iters);
    return {assign.to(at::kHalf), clusters.to(at::kHalf), potentials};
  }
  const cpu::Transport transport =
      make_transport(op, centroids_, lam, num_iters, cost_scale, tol, max_iters);
  const at::Tensor z = z_.contiguous(), centroids = centroids_.contiguous();
  const auto dtype = kernel_dtype(op, z);
  const auto wide = dtype == cpu::DType::kFloat64 ? at::kDouble : at::kFloat;
  const auto shape = problems.potentials_shape(z, transport);
  if (z.size(0) == 0) {
    return {empty_output({0, transport.num_clusters}, z.options()),
            at::zeros(centroids.sizes(), z.options()), at::zeros(shape, z.options().dtype(wide))};
  }
  at::Tensor assign = empty_output({problems.num_slots(z), transport.num_clusters}, z.options());
  at::Tensor clusters = empty_output(centroids.sizes(), z.options());
  at::Tensor potentials = empty_output(shape, z.options().dtype(wide));
  const cpu::SinkhornForward call{transport,
                                  dtype,
                                  problems.graph(),
                                  z.size(0),
                                  z.const_data_ptr(),
                                  centroids.const_data_ptr(),
                                  assign.mutable_data_ptr(),
                                  clusters.mutable_data_ptr(),
                                  potentials.mutable_data_ptr()};
  const auto& kernels = cpu::kernels();
  const auto kernel = problems.local() ? kernels.local_sinkhorn : kernels.global_sinkhorn;
  if (!kernel(call, TorchExecutor())) raise_not_finite(op, z, centroids);
  return {assign, clusters, potentials};
}

Gradients backward(const Problems& problems, const OptionalTensor& grad_assign_,
                   const OptionalTensor& grad_clusters_, const at::Tensor& z_,
                   const at::Tensor& centroids_, const at::Tensor& potentials_, double lam,
                   std::optional<int64_t> num_iters, std::string_view cost_scale) {
  const char* op = problems.op;
  problems.check(z_, centroids_);
  const auto as = [&](const OptionalTensor& tensor, at::ScalarType dtype) -> OptionalTensor {
    if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
    return tensor->to(dtype).contiguous();
  };
  if (is_half(z_)) {
    auto [grad_z, grad_centroids] = backward(
        problems, as(grad_assign_, at::kFloat), as(grad_clusters_, at::kFloat), z_.to(at::kFloat),
        centroids_.to(at::kFloat), potentials_, lam, num_iters, cost_scale);
    return {grad_z.to(at::kHalf), grad_centroids.to(at::kHalf)};
  }
  const cpu::Transport transport =
      make_transport(op, centroids_, lam, num_iters, cost_scale, 0., 0);
  const at::Tensor z = z_.contiguous(), centroids = centroids_.contiguous();
  const at::Tensor potentials = potentials_.contiguous();
  const OptionalTensor grad_assign = as(grad_assign_, z.scalar_type());
  const OptionalTensor grad_clusters = as(grad_clusters_, z.scalar_type());
  const auto dtype = kernel_dtype(op, z);
  check_shape(op, "potentials", potentials, problems.potentials_shape(z, transport));
  TORCH_CHECK_VALUE(
      potentials.scalar_type() == (dtype == cpu::DType::kFloat64 ? at::kDouble : at::kFloat), op,
      ": potentials have the wrong dtype ", potentials.scalar_type());
  if (grad_assign) {
    check_shape(op, "grad_assign", *grad_assign, {problems.num_slots(z), transport.num_clusters});
  }
  if (grad_clusters) check_shape(op, "grad_clusters", *grad_clusters, centroids.sizes());
  at::Tensor grad_z = empty_output(z.sizes(), z.options());
  if (z.size(0) == 0) return {grad_z, at::zeros(centroids.sizes(), z.options())};
  at::Tensor grad_centroids = empty_output(centroids.sizes(), z.options());
  const cpu::SinkhornBackward call{transport,
                                   dtype,
                                   problems.graph(),
                                   z.size(0),
                                   grad_assign ? grad_assign->const_data_ptr() : nullptr,
                                   grad_clusters ? grad_clusters->const_data_ptr() : nullptr,
                                   z.const_data_ptr(),
                                   centroids.const_data_ptr(),
                                   potentials.const_data_ptr(),
                                   grad_z.mutable_data_ptr(),
                                   grad_centroids.mutable_data_ptr()};
  const auto& kernels = cpu::kernels();
  const auto kernel =
      problems.local() ? kernels.local_sinkhorn_backward : kernels.global_sinkhorn_backward;
  kernel(call, TorchExecutor());
  return {grad_z, grad_centroids};
}

Solution local_sinkhorn(const at::Tensor& z, const at::Tensor& centroids, const at::Tensor& rowptr,
                        const at::Tensor& member, const at::Tensor& colptr, const at::Tensor& ego,
                        const at::Tensor& slot, double lam, std::optional<int64_t> num_iters,
                        std::string_view cost_scale, double tol, int64_t max_iters) {
  const char* op = "local_sinkhorn";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  return forward({op, &arrays}, z, centroids, lam, num_iters, cost_scale, tol, max_iters);
}

Gradients local_sinkhorn_backward(const OptionalTensor& grad_assign,
                                  const OptionalTensor& grad_clusters, const at::Tensor& z,
                                  const at::Tensor& centroids, const at::Tensor& potentials,
                                  const at::Tensor& rowptr, const at::Tensor& member,
                                  const at::Tensor& colptr, const at::Tensor& ego,
                                  const at::Tensor& slot, double lam,
                                  std::optional<int64_t> num_iters, std::string_view cost_scale) {
  const char* op = "local_sinkhorn_backward";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  return backward({op, &arrays}, grad_assign, grad_clusters, z, centroids, potentials, lam,
                  num_iters, cost_scale);
}

Solution global_sinkhorn(const at::Tensor& z, const at::Tensor& centroids, double lam,
                         std::optional<int64_t> num_iters, std::string_view cost_scale, double tol,
                         int64_t max_iters) {
  return forward({"global_sinkhorn", nullptr}, z, centroids, lam, num_iters, cost_scale, tol,
                 max_iters);
}

Gradients global_sinkhorn_backward(const OptionalTensor& grad_assign,
                                   const OptionalTensor& grad_clusters, const at::Tensor& z,
                                   const at::Tensor& centroids, const at::Tensor& potentials,
                                   double lam, std::optional<int64_t> num_iters,
                                   std::string_view cost_scale) {
  return backward({"global_sinkhorn_backward", nullptr}, grad_assign, grad_clusters, z, centroids,
                  potentials, lam, num_iters, cost_scale);
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) {
  library.impl("local_sinkhorn", &local_sinkhorn);
  library.impl("local_sinkhorn_backward", &local_sinkhorn_backward);
  library.impl("global_sinkhorn", &global_sinkhorn);
  library.impl("global_sinkhorn_backward", &global_sinkhorn_backward);
}

}  // namespace dcgnn
