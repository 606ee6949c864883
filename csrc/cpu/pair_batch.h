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
struct SmallEgo {
  GatheredRows<T> rows;
  int64_t num_rows;
  int64_t number;
  const T* own;
};

// What forward and backward share: the egos of a batch, their axes, and exp(s).
template <class T>
class PairBatch {
 public:
  using A = Acc<T>;
  static constexpr int kEgos = kLanes<A>;
  static constexpr int64_t kMaxRows = 16;

  // Convergence takes another number of steps in every ego.
  static bool takes(const Transport& transport, int64_t num_rows) {
    return transport.num_iters > 0 && num_rows <= kMaxRows;
  }

  bool is_full() const { return count_ == kEgos; }

 protected:
  explicit PairBatch(const Transport& transport) : transport_(transport) {}

  // Visits the ego's rows for its axis and its costs; gives its lane.
  int add_costs(const SmallEgo<T>& ego) {
    const int64_t channels = transport_.channels;
    axes_.reserve(kEgos * 3 * channels);
    A* axis = axis_of(count_);
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
    egos_[count_] = ego;
    return count_++;
  }

  // write(lane) for every ego, retry(number) for one whose logits exp cannot take; forgets them.
  template <class Write, class Retry>
  void finish(Mask<A> large, const Write& write, const Retry& retry) {
    for (int lane = 0; lane < count_; ++lane) {
      if (large[lane]) {
        retry(egos_[lane].number);
      } else {
        write(lane);
      }
    }
    forget();
  }

  void forget() {
    count_ = 0;
    longest_ = 0;
  }

  A* axis_of(int lane) { return axes_.reserve(0) + lane * 3 * transport_.channels; }
  Mask<A> live(int64_t k) const { return load(sizes_) > static_cast<A>(k); }

  // products_ become exp(s); gives the lanes with an |s| above kPairPeak. kBackward: also s in
  // logits_, and the first maximum of the costs, as 2 row + cluster, where they are scaled by it.
  template <bool kBackward>
  Mask<A> fill_exponentials(bool& finite) {
    for (int lane = count_; lane < kEgos; ++lane) sizes_[lane] = squared_lengths_[lane] = 0;
    const Vec<A> length = load(squared_lengths_);
    const bool scaled = transport_.cost_scale != CostScale::kNone;
    Vec<A> sum = {}, most = {}, farthest = {};  // farthest: from the ego's own row
    Mask<A> bad = ~(length <= std::numeric_limits<A>::max());
    for (int64_t k = 0; k < longest_; ++k) {
      const Vec<A> first = load(squares_[k]), product = load(products_[k]);
      const Vec<A> second = first - A(2) * product + length;
      const Vec<A> bounded = second < 0 ? Vec<A>{} : second;
      const Vec<A> larger = scaled ? vmax<A>(first, bounded) : vabs<A>(product);
      if (kBackward) store(seconds_[k], bounded);
      bad |= live(k) & (~(first <= std::numeric_limits<A>::max()) |
                        ~(vabs<A>(product) <= std::numeric_limits<A>::max()));
      sum += select<A>(live(k), first + bounded, Vec<A>{});
      most = vmax<A>(select<A>(live(k), larger, Vec<A>{}), most);
      farthest = vmax<A>(select<A>(live(k), first, Vec<A>{}), farthest);
    }
    finite = reduce_max<A>(select<A>(bad, splat<A>(1), Vec<A>{})) == 0;
    Vec<A> scale = splat<A>(1);
    if (transport_.cost_scale == CostScale::kMax) scale = most;
    if (transport_.cost_scale == CostScale::kMean) {
      const Vec<A> mean = sum / (A(2) * load(sizes_));
      scale = select<A>(sum <= std::numeric_limits<A>::max(), mean, most);
    }
    // Rows that are all equal have cost 0; what their mean is apart from them is rounding.
    if (scaled) scale = select<A>(farthest > 0, scale, Vec<A>{});
    if (kBackward && transport_.cost_scale == CostScale::kMax) {
      Vec<A> place = splat<A>(-1);
      for (int64_t k = longest_ - 1; k >= 0; --k) {
        const A here = static_cast<A>(2 * k);
        place = select<A>(live(k) & (load(seconds_[k]) == most), splat<A>(here + 1), place);
        place = select<A>(live(k) & (load(squares_[k]) == most), splat<A>(here), place);
      }
      store(maxima_, place);
    }
    store(scales_, scale);
    const A lam = static_cast<A>(transport_.lam);
    const Mask<A> some = scale > 0;
    Vec<A> peak = {};
    for (int64_t k = 0; k < longest_; ++k) {
      const Vec<A> difference = length - A(2) * load(products_[k]);
      const Vec<A> s = select<A>(some, clamp_logit<A>(difference / scale * lam), Vec<A>{});
      peak = vmax<A>(select<A>(live(k), vabs<A>(s), Vec<A>{}), peak);
      if (kBackward) store(logits_[k], s);
      store(products_[k], vexp<A>(s));
    }
    return peak > kPairPeak<A>;
  }

  using Rows = A[kMaxRows][kEgos];

  const Transport& transport_;
  int count_ = 0;
  int64_t longest_ = 0;
  SmallEgo<T> egos_[kEgos];
  alignas(kVectorBytes) Rows squares_, products_, seconds_, logits_;
  alignas(kVectorBytes) A sizes_[kEgos];
  alignas(kVectorBytes) A squared_lengths_[kEgos];
  alignas(kVectorBytes) A scales_[kEgos];
  alignas(kVectorBytes) A maxima_[kEgos];
  alignas(kVectorBytes) A sums_[2][kEgos];
  Buffer<A> axes_, history_, means_;
};

template <class T>
class PairForwardBatch : public PairBatch<T> {
 public:
  using typename PairBatch<T>::A;

  struct Outputs {
    T* assign;
    OutputRows<T> clusters;
    A* potentials;
  };

  explicit PairForwardBatch(const Transport& transport) : PairBatch<T>(transport) {}

  void add(const SmallEgo<T>& ego, const Outputs& outputs) {
    outputs_[this->add_costs(ego)] = outputs;
  }

  // Solves and writes the egos that were added; retry(number) as in finish(). False when a cost is
  // not finite.
  template <class Retry>
  bool solve(const Retry& retry) {
    if (this->count_ == 0) return true;
    bool finite = true;
    const Mask<A> large = this->template fill_exponentials<false>(finite);
    if (!finite) {
      this->forget();
      return false;
    }
    iterate();
    this->finish(large, [&](int lane) { write(lane); }, retry);
    return true;
  }

 private:
  static constexpr int kEgos = PairBatch<T>::kEgos;

  // As pair_forward: squares_ and products_ become K P of the first and the second cluster.
  void iterate() {
    const int64_t num_iters = this->transport_.num_iters, longest = this->longest_;
    A* history = this->history_.reserve(num_iters * 2 * kEgos);
    const Vec<A> half = load(this->sizes_) * A(0.5);
    Vec<A> potential[2] = {splat<A>(1), splat<A>(1)}, ratio = splat<A>(1), sums[2] = {};
    for (int64_t t = 0; t < num_iters; ++t) {
      if (t > 0) ratio *= sums[1] / sums[0];
      sums[0] = sums[1] = Vec<A>{};
      for (int64_t k = 0; k < longest; ++k) {
        const Mask<A> live = this->live(k);
        const Vec<A> weight = load(this->products_[k]) * ratio;
        const Vec<A> r = select<A>(live, reciprocal<A>(A(1) + weight), Vec<A>{});
        sums[0] += select<A>(live, weight * r, Vec<A>{});
        sums[1] += r;
      }
      for (int j = 0; j < 2; ++j) {
        potential[j] *= half / sums[j];
        store(history + (2 * t + j) * kEgos, vlog<A>(potential[j]));
      }
    }
    const Vec<A> inverse[2] = {A(1) / sums[0], A(1) / sums[1]};
    for (int64_t k = 0; k < longest; ++k) {
      const Vec<A> weight = load(this->products_[k]) * ratio;
      const Vec<A> r = reciprocal<A>(A(1) + weight);
      const Vec<A> first = weight * r * inverse[0], second = r * inverse[1];
      store(this->squares_[k], first);
      store(this->products_[k], second);
      if constexpr (kIsBFloat16<T>) {
        const WordBits pairs = make_pairs(first * A(0.5), second * A(0.5));
        std::memcpy(assign_pairs_[k], &pairs, sizeof(pairs));
      }
    }
    for (int j = 0; j < 2; ++j) store(this->sums_[j], sums[j]);
  }

  void write(int lane) {
    const SmallEgo<T>& ego = this->egos_[lane];
    const Outputs& out = outputs_[lane];
    const int64_t channels = this->transport_.channels;
    for (int64_t t = 0; t < 2 * this->transport_.num_iters; ++t) {
      out.potentials[t] = this->history_.reserve(0)[t * kEgos + lane];
    }
    const A sums[2] = {this->sums_[0][lane], this->sums_[1][lane]};
    const auto& small = smaller_cluster(sums) == 0 ? this->squares_ : this->products_;
    A weights[PairBatch<T>::kMaxRows];
    for (int64_t k = 0; k < ego.num_rows; ++k) {
      weights[k] = small[k][lane];
      if constexpr (kIsBFloat16<T>) {
        std::memcpy(out.assign + 2 * k, &assign_pairs_[k][lane], sizeof(uint32_t));
      } else {
        out.assign[2 * k] = this->squares_[k][lane] * A(0.5);
        out.assign[2 * k + 1] = this->products_[k][lane] * A(0.5);
      }
    }
    A* mean = this->means_.reserve(channels);
    weighted_sums<1, false>(ego.rows, ego.num_rows, weights, 0, static_cast<const A*>(nullptr),
                            mean);
    write_fresh_clusters(mean, this->axis_of(lane) + 2 * channels, ego.own, sums, channels,
                         out.clusters);
  }

  Outputs outputs_[kEgos];
  alignas(kVectorBytes) uint32_t assign_pairs_[PairBatch<T>::kMaxRows][kEgos];  // of bfloat16
};

template <class T>
class PairBackwardBatch : public PairBatch<T> {
 public:
  using typename PairBatch<T>::A;

  struct Arrays {
    const A* potentials;
    const T* grad_assign;    // or null
    const T* grad_clusters;  // or null
    A* coefficients;
    A* scale_weight;
    PairGradients<T> gradients;
  };

  explicit PairBackwardBatch(const Transport& transport) : PairBatch<T>(transport) {}

  // Also visits the rows for the gradients of K P.
  void add(const SmallEgo<T>& ego, const Arrays& arrays) {
    const int lane = this->add_costs(ego);
    arrays_[lane] = arrays;
    A columns[2 * kMaxRows] = {};
    if (arrays.grad_clusters != nullptr) {
      reduce_rows<Dots<2>, false>(ego.rows, ego.num_rows, arrays.grad_clusters, columns, kMaxRows);
    }
    for (int64_t k = 0; k < ego.num_rows; ++k) {
      for (int j = 0; j < 2; ++j) {
        A value = columns[j * kMaxRows + k];
        if (arrays.grad_assign != nullptr) value += A(0.5) * to_acc(arrays.grad_assign[2 * k + j]);
        gradients_[j][k][lane] = value;
      }
    }
    const int64_t history = 2 * this->transport_.num_iters;
    A* potentials = this->history_.reserve(history * kEgos);
    for (int64_t t = 0; t < history; ++t) potentials[t * kEgos + lane] = arrays.potentials[t];
  }

  // Writes what the egos that were added leave; retry(number) as in finish().
  template <class Retry>
  void solve(const Retry& retry) {
    if (this->count_ == 0) return;
    bool finite;  // the forward has looked
    const Mask<A> large = this->template fill_exponentials<true>(finite);
    differentiate();
    this->finish(large, [&](int lane) { write(lane); }, retry);
  }

 private:
  static constexpr int kEgos = PairBatch<T>::kEgos;
  static constexpr int64_t kMaxRows = PairBatch<T>::kMaxRows;

  // g_j after k iterations, and S_j at that g, as in PairHistory.
  Vec<A> potential(int64_t k, int j) {
    return k == 0 ? Vec<A>{} : load(this->history_.reserve(0) + (2 * (k - 1) + j) * kEgos);
  }
  Vec<A> ratio(int64_t k) { return vexp<A>(potential(k, 0) - potential(k, 1)); }
  Vec<A> sum(int64_t k, int j) {
    return load(this->sizes_) * A(0.5) * vexp<A>(potential(k, j) - potential(k + 1, j));
  }

  // As pair_backward and PairSolver: gradients_[0] becomes 2 lam/scale ds, squares_ become K P of
  // the smaller cluster, and the scale's gradient comes out.
  void differentiate() {
    const int64_t num_iters = this->transport_.num_iters, longest = this->longest_;
    const Vec<A> plan_ratio = ratio(num_iters - 1);
    const Vec<A> sums[2] = {sum(num_iters - 1, 0), sum(num_iters - 1, 1)};
    const Vec<A> inverse[2] = {A(1) / sums[0], A(1) / sums[1]};
    const Mask<A> first_is_smaller = sums[0] < sums[1];
    for (int j = 0; j < 2; ++j) store(this->sums_[j], sums[j]);
    Vec<A> means[2] = {};
    for (int64_t k = 0; k < longest; ++k) {
      const Mask<A> live = this->live(k);
      const Vec<A> weight = load(this->products_[k]) * plan_ratio;
      const Vec<A> r = reciprocal<A>(A(1) + weight);
      const Vec<A> q1 = weight * r * inverse[0], q2 = r * inverse[1];
      store(this->squares_[k], select<A>(first_is_smaller, q1, q2));
      means[0] += select<A>(live, q1 * load(gradients_[0][k]), Vec<A>{});
      means[1] += select<A>(live, q2 * load(gradients_[1][k]), Vec<A>{});
    }
    Vec<A> shift_gradient = {};
    for (int64_t t = num_iters - 1; t >= 0; --t) {
      const bool plan = t == num_iters - 1;
      const Vec<A> here = ratio(t), both = A(1) / sum(t, 0) + A(1) / sum(t, 1);
      Vec<A> moved = {};
      for (int64_t k = 0; k < longest; ++k) {
        const Vec<A> weight = load(this->products_[k]) * here;
        const Vec<A> r2 = reciprocal<A>(A(1) + weight);
        const Vec<A> r1 = weight * r2;
        Vec<A> gradient;
        if (plan) {
          gradient = r1 * inverse[0] * r2 * (load(gradients_[0][k]) - means[0]) -
                     r2 * inverse[1] * r1 * (load(gradients_[1][k]) - means[1]);
          store(gradients_[0][k], gradient);
        } else {
          gradient = -shift_gradient * (r1 * r2 * both);
          store(gradients_[0][k], load(gradients_[0][k]) + gradient);
        }
        moved += select<A>(this->live(k), gradient, Vec<A>{});
      }
      shift_gradient += moved;
    }
    finish_costs();
  }

  void finish_costs() {
    const CostScale kind = this->transport_.cost_scale;
    const Vec<A> scale = load(this->scales_);
    const Mask<A> some = scale > 0;
    Vec<A> dot = {}, total = {};
    const A twice_lam = A(2) * static_cast<A>(this->transport_.lam);
    const Vec<A> factor = select<A>(some, clamp_logit<A>(twice_lam / scale), Vec<A>{});
    for (int64_t k = 0; k < this->longest_; ++k) {
      const Vec<A> gradient = load(gradients_[0][k]);
      const Vec<A> value = clamp_logit<A>(gradient * factor);
      dot += select<A>(this->live(k), gradient * load(this->logits_[k]), Vec<A>{});
      total += select<A>(this->live(k), value, Vec<A>{});
      store(gradients_[0][k], value);
    }
    store(totals_, total);
    Vec<A> of_scale = select<A>(some, clamp_logit<A>(-dot / scale), Vec<A>{});
    if (kind == CostScale::kNone) of_scale = Vec<A>{};
    if (kind == CostScale::kMean) of_scale = of_scale / load(this->sizes_);
    if (kind == CostScale::kMax) of_scale = A(2) * of_scale;
    store(scale_gradients_, of_scale);
  }

  void write(int lane) {
    const SmallEgo<T>& ego = this->egos_[lane];
    const Arrays& arrays = arrays_[lane];
    const int64_t channels = this->transport_.channels, num_rows = ego.num_rows;
    const A* axis = this->axis_of(lane);
    PairScaleGradient<A> scale;
    const CostScale kind = this->transport_.cost_scale;
    (kind == CostScale::kMax ? scale.at_maximum : scale.everywhere) = scale_gradients_[lane];
    const A mark = scale.everywhere != 0 ? A(-1) : A(1);
    A weights[kMaxRows];
    for (int64_t k = 0; k < num_rows; ++k) {
      weights[k] = gradients_[0][k][lane];
      arrays.coefficients[2 * k] = mark * this->squares_[k][lane];
      arrays.coefficients[2 * k + 1] = -weights[k] - scale.everywhere;
    }
    *arrays.scale_weight = scale.everywhere != 0 ? A(2) * scale.everywhere : scale.at_maximum;
    A* grad_first = this->means_.reserve(3 * channels);
    A* grad_second = grad_first + channels;
    weighted_sums<1, true>(ego.rows, num_rows, weights, 0, axis, grad_first);
    second_centroid_gradient(axis + channels, totals_[lane], channels, grad_first, grad_second);
    if (scale.everywhere != 0) {
      for (int64_t k = 0; k < num_rows; ++k) weights[k] = 1;
      A* sum = grad_second + channels;
      weighted_sums<1, true>(ego.rows, num_rows, weights, 0, axis, sum);
      add_mean_gradient(axis + channels, sum, scale.everywhere, num_rows, channels, grad_first,
                        grad_second);
    }
    if (scale.at_maximum != 0) {
      const int64_t place = static_cast<int64_t>(this->maxima_[lane]);
      add_maximum_coefficient(scale.at_maximum, place % 2, arrays.coefficients + place / 2 * 2);
      add_maximum_gradient(ego.rows.row(place / 2), axis, place % 2, scale.at_maximum, channels,
                           place % 2 == 0 ? grad_first : grad_second);
    }
    const A sums[2] = {this->sums_[0][lane], this->sums_[1][lane]};
    arrays.gradients.write(axis + channels, grad_first, grad_second, arrays.grad_clusters, sums,
                           num_rows, channels);
  }

  Arrays arrays_[kEgos];
  alignas(kVectorBytes) typename PairBatch<T>::Rows gradients_[2];
  alignas(kVectorBytes) A totals_[kEgos];
  alignas(kVectorBytes) A scale_gradients_[kEgos];
};

}  // namespace dcgnn::cpu::DCGNN_ISA
