// dcgnn::linear on the CPU: torch's own matrix product, into memory that gathers are fast on.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "bindings/arguments.h"

namespace dcgnn {
namespace {

// x W^T, with a bias or none. bfloat16 goes through float32 a block of rows at a time: many
// processors have no bfloat16 product, and torch's way around that is far slower.
void multiply(at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias) {
  const bool biased = bias.has_value() && bias->defined();
  if (x.scalar_type() != at::kBFloat16) {
    biased ? at::addmm_out(out, *bias, x, weight.t()) : at::mm_out(out, x, weight.t());
    return;
  }
  constexpr int64_t kRows = 4096;
  const at::Tensor map = weight.to(at::kFloat).t();
  const at::Tensor shift = biased ? bias->to(at::kFloat) : at::Tensor();
  for (int64_t begin = 0; begin < x.size(0); begin += kRows) {
    const int64_t count = std::min(kRows, x.size(0) - begin);
    const at::Tensor rows = x.narrow(0, begin, count).to(at::kFloat);
    out.narrow(0, begin, count).copy_(biased ? at::addmm(shift, rows, map) : at::mm(rows, map));
  }
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
  if (bias.has_value() && bias->defined()) {
    check_same_dtype(op, "bias", *bias, x);
    check_shape(op, "bias", *bias, {weight.size(0)});
  }
  multiply(out, x, weight, bias);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) { library.impl("linear", &linear); }

}  // namespace dcgnn
