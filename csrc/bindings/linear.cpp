// dcgnn::linear on the CPU: torch's own matrix product, into memory that gathers are fast on.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <optional>

#include "bindings/arguments.h"

namespace dcgnn {
namespace {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const char* op = "linear";
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must have shape [N, F_in], got ", x.sizes());
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight must have shape [F_out, F_in], got ",
                    weight.sizes());
  check_same_dtype(op, "weight", weight, x);
  check_shape(op, "weight", weight, {weight.size(0), x.size(1)});
  at::Tensor out = empty_output({x.size(0), weight.size(0)}, x.options());
  if (bias.has_value() && bias->defined()) {
    check_same_dtype(op, "bias", *bias, x);
    check_shape(op, "bias", *bias, {weight.size(0)});
    at::addmm_out(out, *bias, x, weight.t());
  } else {
    at::mm_out(out, x, weight.t());
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) { library.impl("linear", &linear); }

}  // namespace dcgnn
