// From rows to logits, and back from the gradient of logits to the gradient of costs, for any K but
// 2 (see pair_transport.h).
//
//   M_uj = |z_u - c_j|^2,   L_uj = -lam M_uj / scale,   scale = 1 | mean(M) | max(M)
//
// A problem of scale 0 has L = 0.
#pragma once

#include "problem.h"
#include "rows.h"

namespace dcgnn::cpu::DCGNN_ISA {

template <class A>
struct CostState {
  A scale = 1;  // 0: the problem has cost 0
  A peak = 0;   // K = 2: largest |s|
  bool finite = true;
  int64_t max_row = -1, max_cluster = -1;  // the first maximum of M in (row, cluster) order
};

template <class A>
DCGNN_INLINE Vec<A> clamp_logit(Vec<A> x) {
  x = x > kLogitLimit<A> ? splat<A>(kLogitLimit<A>) : x;
  return x < -kLogitLimit<A> ? splat<A>(-kLogitLimit<A>) : x;
}

// Where a cost equals `scale` first. The columns still hold the costs.
template <class A>
void find_maximum(Problem<A>& problem, CostState<A>& state) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  for (int64_t block = 0; block < problem.num_blocks(); ++block) {
    const A* costs = problem.logits(block);
    const int64_t count = problem.block_rows(block);
    for (int64_t u = 0; u < count; u += kLanes<A>) {
      Vec<A> most = load(costs + u);
      for (int64_t c = 1; c < clusters; ++c) most = vmax<A>(load(costs + c * stride + u), most);
      const Mask<A> hit = live_lanes<A>(count - u) & (most == state.scale);
      if (reduce_max<A>(select<A>(hit, splat<A>(1), Vec<A>{})) == 0) continue;
      for (int64_t lane = 0; lane < kLanes<A>; ++lane) {
        for (int64_t c = 0; hit[lane] && c < clusters; ++c) {
          if (costs[c * stride + u + lane] == state.scale) {
            state.max_row = block * kBlockRows + u + lane;
            state.max_cluster = c;
            return;
          }
        }
      }
    }
  }
}

// The sum, the largest and the badness (not finite: above 0) of non-negative costs.
template <class A>
struct CostTotals {
  Vec<A> sum = {}, most = {};
  Mask<A> bad = {};
  DCGNN_INLINE void add(Vec<A> cost, Mask<A> live) {
    const Vec<A> kept = select<A>(live, cost, Vec<A>{});
    bad |= ~(kept <= std::numeric_limits<A>::max());
    sum += kept;
    most = vmax<A>(kept, most);
  }
  DCGNN_INLINE void write(A* totals) const {
    totals[0] = reduce_add<A>(sum);
    totals[1] = reduce_max<A>(most);
    totals[2] = reduce_max<A>(select<A>(bad, splat<A>(1), Vec<A>{}));
  }
  static void fold(A* totals, const A* others) {
    totals[0] += others[0];
    totals[1] = others[1] > totals[1] ? others[1] : totals[1];
    totals[2] += others[2];
  }
};

// The scale that the totals of a problem's costs give.
template <class A>
CostState<A> cost_state(const Problem<A>& problem, const A (&totals)[3]) {
  CostState<A> state;
  state.finite = totals[2] == 0;
  const CostScale kind = problem.transport().cost_scale;
  if (kind == CostScale::kMean) {
    const A count = static_cast<A>(problem.rows()) * static_cast<A>(problem.clusters());
    // A sum that overflows although every cost is finite: bounded by the maximum.
    state.scale = totals[0] <= std::numeric_limits<A>::max() ? totals[0] / count : totals[1];
  } else if (kind == CostScale::kMax) {
    state.scale = totals[1];
  }
  return state;
}

// lam m / scale. Divides before multiplying: a scale may be so small that lam / scale is infinite.
template <class A>
DCGNN_INLINE Vec<A> scaled_logit(Vec<A> m, A scale, A lam) {
  return scale > 0 ? clamp_logit<A>(m / scale * lam) : Vec<A>{};
}

// Fills the logits of every block; then(block) comes when a block has them. Without a scale that is
// one visit, with the block's rows still in cache.
template <bool kFindMaximum, class T, class Rows, class A, class Then>
CostState<A> fill_logits(Problem<A>& problem, const Rows& rows, const T* centroids,
                         const Then& then) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  const CostScale kind = problem.transport().cost_scale;
  const A lam = static_cast<A>(problem.transport().lam);
  const auto finish = [&](int64_t block, A scale) {
    A* columns = problem.logits(block);
    for (int64_t c = 0; c < clusters; ++c) {
      for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
        A* value = columns + c * stride + u;
        store(value, -scaled_logit<A>(load(value), scale, lam));
      });
    }
    then(block);
  };
  A totals[3];
  problem.fold_blocks(
      3, totals,
      [&](int64_t block, A* partial) {
        const int64_t count = problem.block_rows(block);
        A* columns = problem.logits(block);
        reduce_rows_by_all<SquaredDistances, true>(rows.from(block * kBlockRows), count, centroids,
                                                   clusters, columns, stride);
        CostTotals<A> sums;
        for (int64_t c = 0; c < clusters; ++c) {
          for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
            sums.add(load(columns + c * stride + u), live);
          });
        }
        sums.write(partial);
        if (kind == CostScale::kNone) finish(block, A(1));
      },
      CostTotals<A>::fold);
  CostState<A> state = cost_state(problem, totals);
  if (kind == CostScale::kNone) return state;
  if (kFindMaximum && kind == CostScale::kMax) find_maximum(problem, state);
  problem.for_each_block([&](int64_t block) { finish(block, state.scale); });
  return state;
}

// A tiny scale must not make a gradient infinite.
template <class A>
DCGNN_INLINE A limit_gradient(A x) {
  const A most = kLogitLimit<A>;
  return x > most ? most : (x < -most ? -most : x);
}

// Turns dL (the values columns) into 2 dM in place, through the scale.
//   dM = -lam/scale dL;  dscale = -sum(dL L)/scale;  mean: every dM += dscale/(n K);  max: the
//   first maximum in (row, cluster) order += dscale.
template <class A>
class CostGradient {
 public:
  CostGradient(Problem<A>& problem, const CostState<A>& state) : problem_(problem), state_(state) {
    const Transport& transport = problem.transport();
    const A scale = state.scale;
    if (!(scale > 0)) return;  // the problem has cost 0
    factor_ = limit_gradient(A(-2) * static_cast<A>(transport.lam) / scale);
    if (transport.cost_scale == CostScale::kNone) return;
    const A gradient = A(2) * limit_gradient(-logits_by_gradient() / scale);
    if (transport.cost_scale == CostScale::kMax) {
      at_maximum_ = gradient;
    } else {
      everywhere_ =
          gradient / (static_cast<A>(problem.rows()) * static_cast<A>(problem.clusters()));
    }
  }

  void apply(int64_t block) const {
    const int64_t stride = problem_.stride();
    A* values = problem_.values(block);
    for (int64_t c = 0; c < problem_.clusters(); ++c) {
      for_each_vector<A>(problem_.block_rows(block), [&](int64_t u, Mask<A>) {
        A* value = values + c * stride + u;
        store(value, clamp_logit<A>(load(value) * factor_ + everywhere_));
      });
    }
    if (at_maximum_ != 0 && state_.max_row >= 0 && state_.max_row / kBlockRows == block) {
      A* value = values + state_.max_cluster * stride + state_.max_row % kBlockRows;
      *value = limit_gradient(*value + at_maximum_);
    }
  }

 private:
  // sum(dL L)
  A logits_by_gradient() const {
    const int64_t stride = problem_.stride();
    A dot = 0;
    problem_.sum_blocks(1, &dot, [&](int64_t block, A* partial) {
      const A* logits = problem_.logits(block);
      const A* values = problem_.values(block);
      Vec<A> sum = {};
      for (int64_t c = 0; c < problem_.clusters(); ++c) {
        for_each_vector<A>(problem_.block_rows(block), [&](int64_t u, Mask<A> live) {
          const Vec<A> term = load(logits + c * stride + u) * load(values + c * stride + u);
          sum += select<A>(live, term, Vec<A>{});
        });
      }
      *partial = reduce_add<A>(sum);
    });
    return dot;
  }

  Problem<A>& problem_;
  const CostState<A>& state_;
  A factor_ = 0, everywhere_ = 0, at_maximum_ = 0;
};

}  // namespace dcgnn::cpu::DCGNN_ISA
