// dcgnn::linear on the CPU: torch's own matrix product, into memory that gathers are fast on.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "bindings/arguments.h"

namespace dcgnn {
namespace {

// bfloat16 goes through float32 a block at a time: many processors have no bfloat16 product, and
// torch's way around that is far slower. Blocks are cut by the shape alone, and each is the product
// of one thread: the same bits for any number of threads.

// Rows of so many numbers together that a block stays in L2.
int64_t block_rows(int64_t numbers) {
  constexpr int64_t kBlockNumbers = 1 << 16, kFewest = 256;
  return std::max(kFewest, kBlockNumbers / std::max<int64_t>(numbers, 1));
}

int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Float32 memory that takes one block after the other.
class RowBlock {
 public:
  RowBlock(int64_t numbers, const at::Tensor& like)
      : memory_(at::empty({numbers}, like.options().dtype(at::kFloat))) {}
  at::Tensor matrix(int64_t rows, int64_t columns) const {
    return memory_.narrow(0, 0, rows * columns).view({rows, columns});
  }
  // The matrix as float32, in the order that it lies in.
  at::Tensor copy(const at::Tensor& from) const {
    const bool transposed = from.stride(0) == 1 && from.size(1) > 1;
    const at::Tensor to =
        transposed ? matrix(from.size(1), from.size(0)).t() : matrix(from.size(0), from.size(1));
    return to.copy_(from);
  }

 private:
  at::Tensor memory_;
};

// Blocks of rows of x.
void multiply_rows(at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
                   const std::optional<at::Tensor>& bias) {
  const int64_t inputs = x.size(1), outputs = weight.size(0);
  const int64_t size = block_rows(inputs + outputs);
  const at::Tensor map = weight.to(at::kFloat).t();
  const at::Tensor shift = bias ? bias->to(at::kFloat) : at::Tensor();
  TorchExecutor().run(blocks_of(x.size(0), size), [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_gradient;  // in torch a thread's own state
    const RowBlock rows(size * inputs, x), products(size * outputs, x);
    for (int64_t first = begin * size; first < std::min(end * size, x.size(0)); first += size) {
      const int64_t count = std::min(size, x.size(0) - first);
      at::Tensor product = products.matrix(count, outputs);
      const at::Tensor block = rows.copy(x.narrow(0, first, count));
      bias ? at::addmm_out(product, shift, block, map) : at::mm_out(product, block, map);
      out.narrow(0, first, count).copy_(product);
    }
  });
}

// A few long rows, as for the gradient of a weight: blocks of columns of x and of the weight, added
// up in runs of kRun, and the runs in order.
void multiply_columns(at::Tensor& out, const at::Tensor& x, const at::Tensor& weight) {
  constexpr int64_t kRun = 16;
  const int64_t rows = x.size(0), outputs = weight.size(0), length = x.size(1);
  const int64_t size = block_rows(rows + outputs);
  const int64_t runs = blocks_of(length, size * kRun);
  const at::Tensor sums = at::zeros({runs, rows, outputs}, x.options().dtype(at::kFloat));
  TorchExecutor().run(runs, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_gradient;
    const RowBlock left(size * rows, x), right(size * outputs, x);
    for (int64_t run = begin; run < end; ++run) {
      at::Tensor sum = sums.select(0, run);
      const int64_t last = std::min((run + 1) * kRun * size, length);
      for (int64_t first = run * kRun * size; first < last; first += size) {
        const int64_t count = std::min(size, length - first);
        sum.addmm_(left.copy(x.narrow(1, first, count)),
                   right.copy(weight.narrow(1, first, count)).t());
      }
    }
  });
  at::Tensor total = sums.select(0, 0);
  for (int64_t run = 1; run < runs; ++run) total.add_(sums.select(0, run));
  out.copy_(total);
}

// x W^T, with a bias or none.
void multiply(at::Tensor& out, const at::Tensor& x, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias) {
  constexpr int64_t kLong = 1 << 14;
  if (x.scalar_type() != at::kBFloat16) {
    bias ? at::addmm_out(out, *bias, x, weight.t()) : at::mm_out(out, x, weight.t());
  } else if (!bias && x.size(1) >= kLong && x.size(1) >= 16 * (x.size(0) + weight.size(0))) {
    multiply_columns(out, x, weight);
  } else {
    multiply_rows(out, x, weight, bias);
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
  const bool biased = bias.has_value() && bias->defined();
  if (biased) {
    check_same_dtype(op, "bias", *bias, x);
    check_shape(op, "bias", *bias, {weight.size(0)});
  }
  multiply(out, x, weight, biased ? bias : std::nullopt);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dcgnn, CPU, library) { library.impl("linear", &linear); }

}  // namespace dcgnn
