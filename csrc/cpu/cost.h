// From rows to logits, and back from the gradient of logits to the gradient of costs.
//
//   M_uj = |z_u - c_j|^2,   L_uj = -lam M_uj / scale,   scale = 1 | mean(M) | max(M);   scale 0: L
//   = 0.
//
// K = 2 needs only s_u = L_u1 - L_u2. Without a scale that is one dot product a row,
// s_u = 2 lam (c_1 - c_2) . (z_u - (c_1 + c_2) / 2), taken about the midpoint so that a common
// offset of z and c costs no digits. With a scale both distances are needed.
#pragma once

#include "problem.h"
#include "rows.h"

namespace dcgnn::cpu::DCGNN_ISA {

template <class A>
struct CostState {
  A scale = 1;  // 0: the problem has cost 0
  A peak = 0;   // largest |s| for K = 2; otherwise unused
  bool finite = true;
  int64_t max_row = -1, max_cluster = -1;  // the first maximum of M in (row, cluster) order
};

template <class A>
DCGNN_INLINE Vec<A> clamp_logit(Vec<A> x) {
  x = x > kLogitLimit<A> ? splat<A>(kLogitLimit<A>) : x;
  return x < -kLogitLimit<A> ? splat<A>(-kLogitLimit<A>) : x;
}

// The values that one ego gives to all of its rows: for K = 2 without a scale d = c_1 - c_2 and the
// midpoint, in the accumulation type.
template <class T>
void pair_axis(const T* centroids, int64_t channels, Acc<T>* axis) {
  using A = Acc<T>;
  for_each_slice<A, 1>(channels, [&](auto slice) {
    const Vec<A> first = slice.load(centroids, 0), second = slice.load(centroids + channels, 0);
    slice.store(axis, 0, first - second);
    slice.store(axis + channels, 0, (first + second) * A(0.5));
  });
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

// Fills the logits of every block; see CostState. `axis` has room for 2 F numbers.
template <bool kFindMaximum, class T, class Rows, class A>
CostState<A> fill_logits(Problem<A>& problem, const Rows& rows, const T* centroids, A* axis) {
  const Transport& transport = problem.transport();
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  const bool scaled = transport.cost_scale != CostScale::kNone;
  const bool pair = clusters == 2;
  const A lam = static_cast<A>(transport.lam);
  if (pair && !scaled) pair_axis(centroids, rows.channels, axis);

  // Distances (or the dot product), and per block: their sum, their maximum, how many are not
  // finite.
  A totals[3];
  problem.fold_blocks(
      3, totals,
      [&](int64_t block, A* partial) {
        const int64_t count = problem.block_rows(block);
        A* columns = problem.logits(block);
        const Rows block_rows = rows.from(block * kBlockRows);
        int64_t used = clusters;
        if (pair && !scaled) {
          const A* midpoint = axis + rows.channels;
          const A* direction = axis;
          reduce_rows<CentredDot, 1, true>(block_rows, count, direction, midpoint, columns, stride);
          used = 1;
        } else {
          reduce_rows_by_all<SquaredDistance, true>(block_rows, count, centroids, clusters, columns,
                                                    stride);
        }
        Vec<A> sum = {}, peak = {};
        Mask<A> bad = {};
        for (int64_t c = 0; c < used; ++c) {
          for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
            const Vec<A> m = vabs<A>(load(columns + c * stride + u));
            const Vec<A> kept = select<A>(live, m, Vec<A>{});
            bad |= ~(kept <= std::numeric_limits<A>::max());
            sum += kept;
            peak = vmax<A>(kept, peak);
          });
        }
        partial[0] = reduce_add<A>(sum);
        partial[1] = reduce_max<A>(peak);
        partial[2] = reduce_max<A>(select<A>(bad, splat<A>(1), Vec<A>{}));
      },
      [](A* total, const A* partial) {
        total[0] += partial[0];
        total[1] = partial[1] > total[1] ? partial[1] : total[1];
        total[2] += partial[2];
      });

  CostState<A> state;
  state.finite = totals[2] == 0;
  if (transport.cost_scale == CostScale::kMean) {
    const A count = static_cast<A>(problem.rows()) * static_cast<A>(clusters);
    // A sum that overflows although every cost is finite: bounded by the maximum.
    state.scale = totals[0] <= std::numeric_limits<A>::max() ? totals[0] / count : totals[1];
  } else if (transport.cost_scale == CostScale::kMax) {
    state.scale = totals[1];
    if (kFindMaximum) find_maximum(problem, state);
  }

  const A scale = state.scale;
  // Divide before multiplying: a scale may be so small that lam / scale is infinite.
  const auto logit = [&](Vec<A> m) {
    return scale > 0 ? clamp_logit<A>(m / scale * lam) : Vec<A>{};
  };
  problem.fold_blocks(
      1, &state.peak,
      [&](int64_t block, A* partial) {
        const int64_t count = problem.block_rows(block);
        A* columns = problem.logits(block);
        Vec<A> largest = {};
        if (pair) {
          for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
            const Vec<A> first = load(columns + u);
            const Vec<A> s = logit(scaled ? load(columns + stride + u) - first : A(2) * first);
            store(columns + u, s);
            largest = vmax<A>(select<A>(live, vabs<A>(s), Vec<A>{}), largest);
          });
        } else {
          for (int64_t c = 0; c < clusters; ++c) {
            for_each_vector<A>(count, [&](int64_t u, Mask<A>) {
              store(columns + c * stride + u, -logit(load(columns + c * stride + u)));
            });
          }
        }
        *partial = reduce_max<A>(largest);
      },
      [](A* total, const A* partial) { *total = *partial > *total ? *partial : *total; });
  return state;
}

// Turns dL (the values columns) into 2 dM in place, through the scale.
//   dM = -lam/scale dL;  dscale = -sum(dL L)/scale;  mean: every dM += dscale/(n K);  max: the
//   first
// maximum in (row, cluster) order += dscale.
template <class A>
void logit_gradient_to_cost(Problem<A>& problem, const CostState<A>& state) {
  const Transport& transport = problem.transport();
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  const bool pair = clusters == 2;
  const A scale = state.scale, lam = static_cast<A>(transport.lam);
  const auto limit = [](A x) {  // a tiny scale must not make the gradient infinite
    const A most = kLogitLimit<A>;
    return x > most ? most : (x < -most ? -most : x);
  };

  A scale_gradient = 0;
  if (transport.cost_scale != CostScale::kNone && scale > 0) {
    A dot = 0;
    problem.sum_blocks(1, &dot, [&](int64_t block, A* partial) {
      const int64_t count = problem.block_rows(block);
      const A* logits = problem.logits(block);
      const A* values = problem.values(block);
      Vec<A> sum = {};
      // K = 2: dL_1 = -dL_2, and the logits column holds s = L_1 - L_2.
      for (int64_t c = 0; c < (pair ? 1 : clusters); ++c) {
        for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
          const Vec<A> term = load(logits + c * stride + u) * load(values + c * stride + u);
          sum += select<A>(live, term, Vec<A>{});
        });
      }
      *partial = reduce_add<A>(sum);
    });
    scale_gradient = limit(-dot / scale);
  }
  const A factor = scale > 0 ? limit(A(-2) * lam / scale) : A(0);
  const A everywhere =
      transport.cost_scale == CostScale::kMean
          ? A(2) * scale_gradient / (static_cast<A>(problem.rows()) * static_cast<A>(clusters))
          : A(0);
  problem.for_each_block([&](int64_t block) {
    A* values = problem.values(block);
    const int64_t count = problem.block_rows(block);
    for (int64_t c = 0; c < clusters; ++c) {
      for_each_vector<A>(count, [&](int64_t u, Mask<A>) {
        store(values + c * stride + u,
              clamp_logit<A>(load(values + c * stride + u) * factor + everywhere));
      });
    }
  });

  if (state.max_row >= 0 && scale > 0) {
    const int64_t block = state.max_row / kBlockRows;
    A* value = problem.values(block) + state.max_cluster * stride + state.max_row % kBlockRows;
    *value = limit(*value + A(2) * scale_gradient);
  }
}

}  // namespace dcgnn::cpu::DCGNN_ISA
