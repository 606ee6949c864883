// The working memory of one transport problem: `rows` nodes against K cluster-nodes.
//
// Rows are cut into blocks of kBlockRows. A block keeps its values as columns, [column][row], so
// that all arithmetic on logits runs over vectors of rows whatever K is. Column groups of a block:
//
//   logits [K]: costs M, then -lam M / scale; for K = 2 column 0 alone holds s = L_1 - L_2
//
//   lse [1]: logsumexp_j(L_uj + g_j) of each row
//
//   values [K]: backward only: dP, then W = P dP, then dL
//
//   weights [K]: backward only: K P
//
// Forward writes K P over the logits. A small ego is one block; hubs and the global problem are
// many, shared by the threads of the executor. Sums over rows are taken block by block and added in
// block order.
#pragma once

#include "split.h"
#include "vec.h"

namespace dcgnn::cpu::DCGNN_ISA {

// Far below overflow, so that sums of logits and potentials stay finite.
template <class A>
constexpr A kLogitLimit = std::numeric_limits<A>::max() / A(64);

// Numbers between the beginnings of two columns of `rows` rows. Columns that begin a multiple of
// 4 KB apart would all fall on the same few lines of the nearest cache.
template <class A>
DCGNN_INLINE int64_t column_stride(int64_t rows) {
  constexpr int64_t kPad = kLanes<A> < kPaddedRows ? kPaddedRows : kLanes<A>;
  constexpr int64_t kLine = 64 / sizeof(A), kPage = 4096 / sizeof(A);
  const int64_t stride = (rows + kPad - 1) / kPad * kPad;
  return stride > 0 && stride % kPage == 0 ? stride + kLine : stride;
}

template <class A>
class Problem {
 public:
  Problem(const Transport& transport, const Executor& executor)
      : transport_(transport), executor_(executor) {}

  void reset(int64_t rows, bool backward) {
    rows_ = rows;
    num_blocks_ = (rows + kBlockRows - 1) / kBlockRows;
    stride_ = column_stride<A>(rows < kBlockRows ? rows : kBlockRows);
    num_columns_ = (backward ? 3 : 1) * clusters() + 1;
    columns_.reserve(num_blocks_ * num_columns_ * stride_);
  }

  const Transport& transport() const { return transport_; }
  int64_t rows() const { return rows_; }
  int64_t clusters() const { return transport_.num_clusters; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t stride() const { return stride_; }
  int64_t block_rows(int64_t block) const {
    const int64_t left = rows_ - block * kBlockRows;
    return left < kBlockRows ? left : kBlockRows;
  }

  A* logits(int64_t block) { return column(block, 0); }
  A* lse(int64_t block) { return column(block, clusters()); }
  A* values(int64_t block) { return column(block, clusters() + 1); }
  A* weights(int64_t block) { return column(block, 2 * clusters() + 1); }

  template <class Body>
  DCGNN_INLINE void for_each_block(const Body& body) {
    if (num_blocks_ == 1) {
      body(int64_t{0});
    } else {
      executor_.run(num_blocks_, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) body(block);
      });
    }
  }

  // body(block, partial) fills `width` partial results of a block; out = their sums in block order.
  template <class Body>
  DCGNN_INLINE void sum_blocks(int64_t width, A* out, const Body& body) {
    fold_blocks(width, out, body, [&](A* total, const A* partial) {
      for (int64_t w = 0; w < width; ++w) total[w] += partial[w];
    });
  }

  // The same with fold(total, partial) in place of the sum.
  template <class Body, class Fold>
  DCGNN_INLINE void fold_blocks(int64_t width, A* out, const Body& body, const Fold& fold) {
    if (num_blocks_ == 1) {
      body(int64_t{0}, out);
      return;
    }
    A* partials = partials_.reserve(num_blocks_ * width);
    for_each_block([&](int64_t block) { body(block, partials + block * width); });
    for (int64_t block = 0; block < num_blocks_; ++block) {
      const A* partial = partials + block * width;
      if (block == 0) {
        for (int64_t w = 0; w < width; ++w) out[w] = partial[w];
      } else {
        fold(out, partial);
      }
    }
  }

 private:
  A* column(int64_t block, int64_t c) {
    return columns_.reserve(0) + (block * num_columns_ + c) * stride_;
  }

  const Transport& transport_;
  const Executor& executor_;
  int64_t rows_ = 0, num_blocks_ = 0, stride_ = 0, num_columns_ = 0;
  Buffer<A> columns_, partials_;
};

// body(u, live) for the vectors of rows u .. u + kLanes - 1 of a block; lanes past the end are not
// live.
template <class A, class Body>
DCGNN_INLINE void for_each_vector(int64_t count, const Body& body) {
  for (int64_t u = 0; u < count; u += kLanes<A>) body(u, live_lanes<A>(count - u));
}

}  // namespace dcgnn::cpu::DCGNN_ISA
