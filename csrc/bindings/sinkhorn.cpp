// dcgnn::local_sinkhorn and dcgnn::global_sinkhorn on the CPU, with their backwards.
#include <ATen/ops/isfinite.h>
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

const void* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

// The one place where the local and the global op differ: a graph, or one problem of all nodes.
struct Problems {
  const char* op;
  const GraphArrays* arrays;  // null: global
  bool local() const { return arrays != nullptr; }
  const cpu::Graph* graph() const { return local() ? &arrays->graph : nullptr; }

  // centroids: none where the egos of a local problem start fresh, which is for K = 2 only.
  void check(const at::Tensor& z, const OptionalTensor& centroids, int64_t num_clusters) const {
    TORCH_CHECK_VALUE(z.dim() == 2, op, ": z must have shape [N, F], got ", z.sizes());
    TORCH_CHECK_VALUE(num_clusters >= 1, op, ": there must be at least one cluster-node");
    if (local()) check_shape(op, "z", z, {arrays->graph.num_nodes, z.size(1)});
    if (centroids.has_value()) {
      check_same_dtype(op, "centroids", *centroids, z);
      check_shape(op, "centroids", *centroids, clusters_shape(z, num_clusters));
    } else {
      TORCH_CHECK_VALUE(num_problems() == z.size(0), op,
                        ": centroids may be left out where every node has an ego only");
      TORCH_CHECK_VALUE(local() && num_clusters == 2, op,
                        ": centroids may be left out for two local cluster-nodes only");
    }
  }
  int64_t num_problems() const { return local() ? arrays->graph.num_egos : 1; }
  at::DimVector clusters_shape(const at::Tensor& z, int64_t num_clusters) const {
    if (local()) return {num_problems(), num_clusters, z.size(1)};
    return {num_clusters, z.size(1)};
  }
  int64_t num_slots(const at::Tensor& z) const {
    return local() ? arrays->graph.num_slots : z.size(0);
  }
  at::DimVector potentials_shape(const cpu::Transport& transport) const {
    const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
    if (local()) return {num_problems(), steps, transport.num_clusters};
    return {steps, transport.num_clusters};
  }
};

struct Options {
  int64_t num_clusters;
  double lam;
  std::optional<int64_t> num_iters;
  std::string_view cost_scale;
  double tol = 0;
  int64_t max_iters = 0;

  cpu::Transport transport(const char* op, const at::Tensor& z) const {
    TORCH_CHECK_VALUE(!num_iters.has_value() || *num_iters >= 1, op,
                      ": num_iters must be at least 1, or None");
    const auto scale = parse_cost_scale(op, cost_scale);
    return {num_clusters, z.size(1), lam, num_iters.value_or(0), scale, tol, max_iters};
  }
};

// A contiguous copy, where needed, in a kernel's dtype; nothing where nothing is given.
OptionalTensor as(const OptionalTensor& tensor, at::ScalarType dtype) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return tensor->to(dtype).contiguous();
}

// The kernel saw a cost that is not finite: says whose fault it is.
[[noreturn]] void raise_not_finite(const char* op, const at::Tensor& z,
                                   const OptionalTensor& centroids) {
  TORCH_CHECK_VALUE(at::isfinite(z).all().item<bool>(), op, ": z contains NaN or infinity");
  TORCH_CHECK_VALUE(!centroids.has_value() || at::isfinite(*centroids).all().item<bool>(), op,
                    ": centroids contains NaN or infinity");
  TORCH_CHECK_VALUE(false, op, ": squared distances between z and centroids overflow ",
                    z.scalar_type());
}

Solution forward(const Problems& problems, const at::Tensor& z_, const OptionalTensor& centroids_,
                 const Options& options) {
  const char* op = problems.op;
  problems.check(z_, centroids_, options.num_clusters);
  if (is_half(z_)) {
    auto [assign, clusters, potentials] =
        forward(problems, z_.to(at::kFloat), as(centroids_, at::kFloat), options);
    return {assign.to(at::kHalf), clusters.to(at::kHalf), potentials};
  }
  const cpu::Transport transport = options.transport(op, z_);
  const at::Tensor z = z_.contiguous();
  const OptionalTensor centroids = as(centroids_, z.scalar_type());
  const auto dtype = kernel_dtype(op, z);
  const auto wide = dtype == cpu::DType::kFloat64 ? at::kDouble : at::kFloat;
  const auto clusters_shape = problems.clusters_shape(z, options.num_clusters);
  const auto potentials_shape = problems.potentials_shape(transport);
  if (z.size(0) == 0) {
    return {empty_output({0, transport.num_clusters}, z.options()),
            at::zeros(clusters_shape, z.options()),
            at::zeros(potentials_shape, z.options().dtype(wide))};
  }
  at::Tensor assign = empty_output({problems.num_slots(z), transport.num_clusters}, z.options());
  at::Tensor clusters = empty_output(clusters_shape, z.options());
  at::Tensor potentials = empty_output(potentials_shape, z.options().dtype(wide));
  const cpu::SinkhornForward call{transport,
                                  dtype,
                                  problems.graph(),
                                  z.size(0),
                                  z.const_data_ptr(),
                                  data_or_null(centroids),
                                  assign.mutable_data_ptr(),
                                  clusters.mutable_data_ptr(),
                                  potentials.mutable_data_ptr()};
  const auto& kernels = cpu::kernels();
  const auto kernel = problems.local() ? kernels.local_sinkhorn : kernels.global_sinkhorn;
  if (!kernel(call, TorchExecutor())) raise_not_finite(op, z, centroids);
  return {assign, clusters, potentials};
}

// Without centroids their gradient has size 0.
Gradients backward(const Problems& problems, const OptionalTensor& grad_assign_,
                   const OptionalTensor& grad_clusters_, const at::Tensor& z_,
                   const OptionalTensor& centroids_, const at::Tensor& potentials_,
                   const Options& options) {
  const char* op = problems.op;
  problems.check(z_, centroids_, options.num_clusters);
  if (is_half(z_)) {
    auto [grad_z, grad_centroids] =
        backward(problems, as(grad_assign_, at::kFloat), as(grad_clusters_, at::kFloat),
                 z_.to(at::kFloat), as(centroids_, at::kFloat), potentials_, options);
    return {grad_z.to(at::kHalf), grad_centroids.to(at::kHalf)};
  }
  const cpu::Transport transport = options.transport(op, z_);
  const at::Tensor z = z_.contiguous(), potentials = potentials_.contiguous();
  const OptionalTensor centroids = as(centroids_, z.scalar_type());
  const OptionalTensor grad_assign = as(grad_assign_, z.scalar_type());
  const OptionalTensor grad_clusters = as(grad_clusters_, z.scalar_type());
  const auto dtype = kernel_dtype(op, z);
  const auto wide = dtype == cpu::DType::kFloat64 ? at::kDouble : at::kFloat;
  const auto clusters_shape = problems.clusters_shape(z, options.num_clusters);
  check_shape(op, "potentials", potentials, problems.potentials_shape(transport));
  TORCH_CHECK_VALUE(potentials.scalar_type() == wide, op, ": potentials have the wrong dtype ",
                    potentials.scalar_type());
  const int64_t num_slots = problems.num_slots(z);
  if (grad_assign) {
    check_shape(op, "grad_assign", *grad_assign, {num_slots, transport.num_clusters});
  }
  if (grad_clusters) check_shape(op, "grad_clusters", *grad_clusters, clusters_shape);
  at::Tensor grad_z = empty_output(z.sizes(), z.options());
  at::Tensor grad_centroids =
      centroids ? empty_output(clusters_shape, z.options()) : empty_output({0}, z.options());
  if (z.size(0) == 0) return {grad_z, grad_centroids.zero_()};
  at::Tensor coefficients = empty_output(
      {cpu::num_coefficients(transport, !problems.local(), num_slots, problems.num_problems())},
      z.options().dtype(wide));
  const int64_t table_problems =
      cpu::table_problems(transport, problems.num_problems(), z.element_size());
  at::Tensor table =
      empty_output({table_problems, cpu::table_rows(transport), z.size(1)}, z.options());
  const cpu::SinkhornBackward call{transport,
                                   dtype,
                                   problems.graph(),
                                   z.size(0),
                                   data_or_null(grad_assign),
                                   data_or_null(grad_clusters),
                                   z.const_data_ptr(),
                                   data_or_null(centroids),
                                   potentials.const_data_ptr(),
                                   coefficients.mutable_data_ptr(),
                                   table.mutable_data_ptr(),
                                   table_problems,
                                   grad_z.mutable_data_ptr(),
                                   grad_centroids.mutable_data_ptr()};
  const auto& kernels = cpu::kernels();
  const auto kernel =
      problems.local() ? kernels.local_sinkhorn_backward : kernels.global_sinkhorn_backward;
  kernel(call, TorchExecutor());
  return {grad_z, grad_centroids};
}

Solution local_sinkhorn(const at::Tensor& z, const OptionalTensor& centroids,
                        const at::Tensor& rowptr, const at::Tensor& member,
                        const at::Tensor& colptr, const at::Tensor& ego, const at::Tensor& slot,
                        int64_t num_clusters, double lam, std::optional<int64_t> num_iters,
                        std::string_view cost_scale, double tol, int64_t max_iters) {
  const char* op = "local_sinkhorn";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  return forward({op, &arrays}, z, centroids,
                 {num_clusters, lam, num_iters, cost_scale, tol, max_iters});
}

Gradients local_sinkhorn_backward(const OptionalTensor& grad_assign,
                                  const OptionalTensor& grad_clusters, const at::Tensor& z,
                                  const OptionalTensor& centroids, const at::Tensor& potentials,
                                  const at::Tensor& rowptr, const at::Tensor& member,
                                  const at::Tensor& colptr, const at::Tensor& ego,
                                  const at::Tensor& slot, int64_t num_clusters, double lam,
                                  std::optional<int64_t> num_iters, std::string_view cost_scale) {
  const char* op = "local_sinkhorn_backward";
  const GraphArrays arrays(op, rowptr, member, colptr, ego, slot);
  return backward({op, &arrays}, grad_assign, grad_clusters, z, centroids, potentials,
                  {num_clusters, lam, num_iters, cost_scale});
}

int64_t count_clusters(const char* op, const at::Tensor& centroids) {
  TORCH_CHECK_VALUE(centroids.dim() == 2, op, ": centroids must have shape [K, F], got ",
                    centroids.sizes());
  return centroids.size(0);
}

Solution global_sinkhorn(const at::Tensor& z, const at::Tensor& centroids, double lam,
                         std::optional<int64_t> num_iters, std::string_view cost_scale, double tol,
                         int64_t max_iters) {
  const char* op = "global_sinkhorn";
  return forward({op, nullptr}, z, centroids,
                 {count_clusters(op, centroids), lam, num_iters, cost_scale, tol, max_iters});
}

Gradients global_sinkhorn_backward(const OptionalTensor& grad_assign,
                                   const OptionalTensor& grad_clusters, const at::Tensor& z,
                                   const at::Tensor& centroids, const at::Tensor& potentials,
                                   double lam, std::optional<int64_t> num_iters,
                                   std::string_view cost_scale) {
  const char* op = "global_sinkhorn_backward";
  return backward({op, nullptr}, grad_assign, grad_clusters, z, centroids, potentials,
                  {count_clusters(op, centroids), lam, num_iters, cost_scale});
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) {
  library.impl("local_sinkhorn", &local_sinkhorn);
  library.impl("local_sinkhorn_backward", &local_sinkhorn_backward);
  library.impl("global_sinkhorn", &global_sinkhorn);
  library.impl("global_sinkhorn_backward", &global_sinkhorn_backward);
}

}  // namespace dcgnn
