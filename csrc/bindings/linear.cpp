// dcgnn::linear on the CPU, into memory that gathers are fast on.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <optional>

#include "bindings/arguments.h"

namespace dcgnn {
namespace {

bool has_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
}

// A few products of long rows, as for the gradient of a weight: sums over so many numbers are taken
// in blocks, by several threads.
bool is_sum_of_outer_products(const at::Tensor& x, const at::Tensor& weight) {
  return x.size(1) >= 4 * (x.size(0) + weight.size(0));
}

// x W^T, with a bias or none.
void multiply(const char* op, at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias) {
  if (!has_kernel(x.scalar_type())) {
    bias ? at::addmm_out(out, *bias, x, weight.t()) : at::mm_out(out, x, weight.t());
    return;
  }
  const cpu::DType dtype = kernel_dtype(op, x);
  if (!bias && is_sum_of_outer_products(x, weight)) {
    const at::Tensor left = x.t().contiguous(), right = weight.t().contiguous();
    cpu::kernels().outer_products({dtype, x.size(1), x.size(0), weight.size(0),
                                   left.const_data_ptr(), right.const_data_ptr(), out.data_ptr()},
                                  TorchExecutor());
    return;
  }
  const at::Tensor rows = x.contiguous();
  const at::Tensor shift = bias ? bias->contiguous() : at::Tensor();
  cpu::kernels().linear({dtype,
                         x.size(0),
                         x.size(1),
                         weight.size(0),
                         rows.const_data_ptr(),
                         weight.const_data_ptr(),
                         {weight.stride(0), weight.stride(1)},
                         bias ? shift.const_data_ptr() : nullptr,
                         out.data_ptr()},
                        TorchExecutor());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const char* op = "linear";
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must have shape [N, F_in], got ", x.sizes());
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight must have shape [F_out, F_in], got ",
                    weight.sizes());
  check_same_dtype(op, "weight", weight, x);
  check_shape(op, "weight", weight, {weight.size(0), x.size(1)});
  at::Tensor out = empty_output({x.size(0), weight.size(0)}, x.options());
  const bool biased = bias.has_value() && bias->defined();
  if (biased) {
    check_same_dtype(op, "bias", *bias, x);
    check_shape(op, "bias", *bias, {weight.size(0)});
  }
  multiply(op, out, x, weight, biased ? bias : std::nullopt);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) { library.impl("linear", &linear); }

}  // namespace dcgnn
