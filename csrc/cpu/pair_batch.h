// Small egos with K = 2 and a fresh start, one a lane of a vector.
//
// An ego of a few rows is a long chain of short steps: sums across a vector, a division, and again.
// Side by side the chains of kLanes egos cost about what one of them does alone. Rows are visited
// ego by ego, as in pair_transport.h, whose formulas these are; the logits stand as [row][ego]. A
// lane's numbers do not depend on the other lanes, nor on which egos share a batch.
#pragma once

#include "pair_transport.h"

namespace dcgnn::cpu::DCGNN_ISA {

template <class T>
class PairBatch {
 public:
  using A = Acc<T>;
  static constexpr int kEgos = kLanes<A>;
  static constexpr int64_t kMaxRows = 16;

  struct Ego {
    GatheredRows<T> rows;
    int64_t num_rows;
    int64_t number;
    const T* own;
    T* assign;
    T* clusters;
    A* potentials;
  };

  explicit PairBatch(const Transport& transport) : transport_(transport) {}

  // Convergence takes another number of steps in every ego.
  static bool takes(const Transport& transport, int64_t num_rows) {
    return transport.num_iters > 0 && num_rows <= kMaxRows;
  }

  bool is_full() const { return count_ == kEgos; }

  // Visits the ego's rows for its axis and its costs.
  void add(const Ego& ego) {
    const int64_t channels = transport_.channels;
    A* axis = axes_.reserve(kEgos * 3 * channels) + count_ * 3 * channels;
    sum_rows(ego.rows, ego.num_rows, ego.own, axis + 2 * channels);
    fresh_axis(ego.own, ego.num_rows, channels, axis);
    squared_lengths_[count_] = squared_length(axis + channels, channels);
    A columns[2 * kMaxRows];
    if (transport_.cost_scale == CostScale::kNone) {
      reduce_rows<CentredDot, false>(ego.rows, ego.num_rows, axis, columns + kMaxRows, kMaxRows);
      for (int64_t k = 0; k < ego.num_rows; ++k) squares_[k][count_] = 0;
    } else {
      reduce_rows<CentredSquareAndDot, false>(ego.rows, ego.num_rows, axis, columns, kMaxRows);
      for (int64_t k = 0; k < ego.num_rows; ++k) squares_[k][count_] = columns[k];
    }
    for (int64_t k = 0; k < ego.num_rows; ++k) products_[k][count_] = columns[kMaxRows + k];
    sizes_[count_] = static_cast<A>(ego.num_rows);
    if (ego.num_rows > longest_) longest_ = ego.num_rows;
    egos_[count_++] = ego;
  }

  // Solves and writes the egos that were added, and forgets them. retry(number) for one whose
  // logits exp cannot take. False when a cost is not finite.
  template <class Retry>
  bool solve(const Retry& retry) {
    for (int lane = count_; lane < kEgos; ++lane) sizes_[lane] = squared_lengths_[lane] = 0;
    bool finite = true;
    const Mask<A> large = fill_exponentials(finite);
    if (finite) {
      iterate();
      for (int lane = 0; lane < count_; ++lane) {
        if (large[lane]) {
          retry(egos_[lane].number);
        } else {
          write(lane);
        }
      }
    }
    count_ = 0;
    longest_ = 0;
    return finite;
  }

 private:
  Mask<A> live(int64_t k) const { return load(sizes_) > static_cast<A>(k); }

  // products_ become exp(s); gives the lanes with an |s| above kPairPeak.
  Mask<A> fill_exponentials(bool& finite) {
    const Vec<A> length = load(squared_lengths_);
    const bool scaled = transport_.cost_scale != CostScale::kNone;
    Vec<A> sum = {}, most = {};
    Mask<A> bad = ~(length <= std::numeric_limits<A>::max());
    for (int64_t k = 0; k < longest_; ++k) {
      const Vec<A> first = load(squares_[k]), product = load(products_[k]);
      const Vec<A> second = first - A(2) * product + length;
      const Vec<A> bounded = second < 0 ? Vec<A>{} : second;
      const Vec<A> larger = scaled ? vmax<A>(first, bounded) : vabs<A>(product);
      bad |= live(k) & (~(first <= std::numeric_limits<A>::max()) |
                        ~(vabs<A>(product) <= std::numeric_limits<A>::max()));
      sum += select<A>(live(k), first + bounded, Vec<A>{});
      most = vmax<A>(select<A>(live(k), larger, Vec<A>{}), most);
    }
    finite = reduce_max<A>(select<A>(bad, splat<A>(1), Vec<A>{})) == 0;
    Vec<A> scale = splat<A>(1);
    if (transport_.cost_scale == CostScale::kMax) scale = most;
    if (transport_.cost_scale == CostScale::kMean) {
      const Vec<A> mean = sum / (A(2) * load(sizes_));
      scale = select<A>(sum <= std::numeric_limits<A>::max(), mean, most);
    }
    const A lam = static_cast<A>(transport_.lam);
    const Mask<A> some = scale > 0;
    Vec<A> peak = {};
    for (int64_t k = 0; k < longest_; ++k) {
      const Vec<A> difference = length - A(2) * load(products_[k]);
      const Vec<A> s = select<A>(some, clamp_logit<A>(difference / scale * lam), Vec<A>{});
      peak = vmax<A>(select<A>(live(k), vabs<A>(s), Vec<A>{}), peak);
      store(products_[k], vexp<A>(s));
    }
    return peak > kPairPeak<A>;
  }

  // As pair_forward: squares_ and products_ become K P of the first and the second cluster.
  void iterate() {
    const int64_t num_iters = transport_.num_iters;
    A* history = history_.reserve(num_iters * 2 * kEgos);
    const Vec<A> half = load(sizes_) * A(0.5);
    Vec<A> potential[2] = {splat<A>(1), splat<A>(1)}, ratio = splat<A>(1), sums[2] = {};
    for (int64_t t = 0; t < num_iters; ++t) {
      if (t > 0) ratio *= sums[1] / sums[0];
      sums[0] = sums[1] = Vec<A>{};
      for (int64_t k = 0; k < longest_; ++k) {
        const Vec<A> weight = load(products_[k]) * ratio;
        const Vec<A> r = select<A>(live(k), reciprocal<A>(A(1) + weight), Vec<A>{});
        sums[0] += select<A>(live(k), weight * r, Vec<A>{});
        sums[1] += r;
      }
      for (int j = 0; j < 2; ++j) {
        potential[j] *= half / sums[j];
        store(history + (2 * t + j) * kEgos, vlog<A>(potential[j]));
      }
    }
    const Vec<A> inverse[2] = {A(1) / sums[0], A(1) / sums[1]};
    for (int64_t k = 0; k < longest_; ++k) {
      const Vec<A> weight = load(products_[k]) * ratio;
      const Vec<A> r = reciprocal<A>(A(1) + weight);
      const Vec<A> first = weight * r * inverse[0], second = r * inverse[1];
      store(squares_[k], first);
      store(products_[k], second);
      if constexpr (kIsBFloat16<T>) {
        const WordBits pairs = make_pairs(first * A(0.5), second * A(0.5));
        std::memcpy(assign_pairs_[k], &pairs, sizeof(pairs));
      }
    }
    for (int j = 0; j < 2; ++j) store(sums_[j], sums[j]);
  }

  void write(int lane) {
    const Ego& ego = egos_[lane];
    const int64_t channels = transport_.channels;
    for (int64_t t = 0; t < 2 * transport_.num_iters; ++t) {
      ego.potentials[t] = history_.reserve(0)[t * kEgos + lane];
    }
    const A sums[2] = {sums_[0][lane], sums_[1][lane]};
    const auto& small = smaller_cluster(sums) == 0 ? squares_ : products_;
    A weights[kMaxRows];
    for (int64_t k = 0; k < ego.num_rows; ++k) {
      weights[k] = small[k][lane];
      if constexpr (kIsBFloat16<T>) {
        std::memcpy(ego.assign + 2 * k, &assign_pairs_[k][lane], sizeof(uint32_t));
      } else {
        ego.assign[2 * k] = squares_[k][lane] * A(0.5);
        ego.assign[2 * k + 1] = products_[k][lane] * A(0.5);
      }
    }
    A* mean = mean_.reserve(channels);
    weighted_sums<1, false>(ego.rows, ego.num_rows, weights, 0, static_cast<const A*>(nullptr),
                            mean);
    const A* axis = axes_.reserve(0) + lane * 3 * channels;
    write_fresh_clusters(mean, axis + 2 * channels, ego.own, sums, channels, ego.clusters);
  }

  const Transport& transport_;
  int count_ = 0;
  int64_t longest_ = 0;
  Ego egos_[kEgos];
  alignas(kVectorBytes) A squares_[kMaxRows][kEgos];
  alignas(kVectorBytes) A products_[kMaxRows][kEgos];
  alignas(kVectorBytes) uint32_t assign_pairs_[kMaxRows][kEgos];  // bfloat16: a row of assign
  alignas(kVectorBytes) A sizes_[kEgos];
  alignas(kVectorBytes) A squared_lengths_[kEgos];
  alignas(kVectorBytes) A sums_[2][kEgos];
  Buffer<A> axes_, history_, mean_;
};

}  // namespace dcgnn::cpu::DCGNN_ISA
