// Sinkhorn in the log domain: any K, any finite cost.
//
//   lse_u = logsumexp_j(L_uj + g_j)            (f_u = -log n - lse_u)
//   sum_j = logsumexp_u(L_uj + g_j - lse_u)    (the log of the column sum of R_uj = exp(L_uj + g_j
//   - lse_u)) g_j  <- g_j + log(n / K) - sum_j K P_uj = exp(L_uj + g_j - lse_u - sum_j)   at the g
//   before the last step, so that columns are exact
#pragma once

#include "problem.h"

namespace dcgnn::cpu::DCGNN_ISA {

template <class A>
void fill_lse(Problem<A>& problem, int64_t block, const A* g) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  const A* logits = problem.logits(block);
  A* lse = problem.lse(block);
  for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
    Vec<A> most = load(logits + u) + g[0];
    for (int64_t j = 1; j < clusters; ++j) {
      most = vmax<A>(load(logits + j * stride + u) + g[j], most);
    }
    Vec<A> sum = {};
    for (int64_t j = 0; j < clusters; ++j) {
      sum += vexp<A>(load(logits + j * stride + u) + g[j] - most);
    }
    store(lse + u, most + vlog<A>(sum));
  });
}

// Up to so many clusters a vector of rows keeps all of its R_uj at hand.
constexpr int64_t kFusedClusters = 32;
// 1 / S_j below this: R_uj may be computed alone, what underflows does not count.
template <class A>
constexpr A kFusedLog = sizeof(A) == 4 ? A(40) : A(300);

// r[j] = R_uj at g for the rows u .. u + kLanes - 1, with one exponential each; returns their lse.
template <class A>
DCGNN_INLINE Vec<A> row_softmax(const A* logits, int64_t stride, int64_t clusters, const A* g,
                                Vec<A>* r, bool want_lse) {
  Vec<A> most = load(logits) + g[0];
  r[0] = most;
  for (int64_t j = 1; j < clusters; ++j) {
    r[j] = load(logits + j * stride) + g[j];
    most = vmax<A>(r[j], most);
  }
  Vec<A> sum = {};
  for (int64_t j = 0; j < clusters; ++j) {
    r[j] = vexp<A>(r[j] - most);
    sum += r[j];
  }
  const Vec<A> inverse = reciprocal<A>(sum);
  for (int64_t j = 0; j < clusters; ++j) r[j] *= inverse;
  return want_lse ? most + vlog<A>(sum) : most;
}

// The same result with one exponential an entry, where no column sum is too small for it; false:
// one is. Leaves lse of every row.
template <class A>
bool fused_column_sums(Problem<A>& problem, const A* g, A* sums) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  if (clusters > kFusedClusters) return false;
  problem.sum_blocks(clusters, sums, [&](int64_t block, A* partial) {
    const A* logits = problem.logits(block);
    A* lse = problem.lse(block);
    Vec<A> r[kFusedClusters], total[kFusedClusters];
    for (int64_t j = 0; j < clusters; ++j) total[j] = Vec<A>{};
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      store(lse + u, row_softmax<A>(logits + u, stride, clusters, g, r, true));
      for (int64_t j = 0; j < clusters; ++j) total[j] += select<A>(live, r[j], Vec<A>{});
    });
    for (int64_t j = 0; j < clusters; ++j) partial[j] = reduce_add<A>(total[j]);
  });
  bool enough = true;
  for (int64_t j = 0; j < clusters; ++j) {
    enough &= sums[j] > std::exp(-kFusedLog<A>);
    sums[j] = std::log(sums[j]);
  }
  return enough;
}

// sums[j] as above; leaves lse of every row. `parts` has room for 2 K numbers.
template <class A>
void log_column_sums(Problem<A>& problem, const A* g, A* sums, A* parts) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  problem.fold_blocks(
      2 * clusters, parts,
      [&](int64_t block, A* partial) {
        fill_lse(problem, block, g);
        const A* lse = problem.lse(block);
        const int64_t count = problem.block_rows(block);
        for (int64_t j = 0; j < clusters; ++j) {
          const A* column = problem.logits(block) + j * stride;
          const Vec<A> lowest = splat<A>(-std::numeric_limits<A>::max());
          Vec<A> most = lowest, sum = {};
          for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
            most = vmax<A>(select<A>(live, load(column + u) + g[j] - load(lse + u), lowest), most);
          });
          const A peak = reduce_max<A>(most);
          for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
            const Vec<A> term = vexp<A>(load(column + u) + g[j] - load(lse + u) - peak);
            sum += select<A>(live, term, Vec<A>{});
          });
          partial[2 * j] = peak;
          partial[2 * j + 1] = reduce_add<A>(sum);
        }
      },
      [&](A* total, const A* partial) {
        for (int64_t j = 0; j < clusters; ++j) {
          A* peak = total + 2 * j;
          const A* other = partial + 2 * j;
          const A most = peak[0] > other[0] ? peak[0] : other[0];
          peak[1] = peak[1] * std::exp(peak[0] - most) + other[1] * std::exp(other[0] - most);
          peak[0] = most;
        }
      });
  for (int64_t j = 0; j < clusters; ++j) sums[j] = parts[2 * j] + std::log(parts[2 * j + 1]);
}

// The logits columns become K P.
template <class A>
void log_finish(Problem<A>& problem, const A* g, const A* sums) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  problem.for_each_block([&](int64_t block) {
    const A* lse = problem.lse(block);
    for (int64_t j = 0; j < clusters; ++j) {
      A* column = problem.logits(block) + j * stride;
      for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
        store(column + u, vexp<A>(load(column + u) + (g[j] - sums[j]) - load(lse + u)));
      });
    }
  });
}

// history[t * K + j] = g_j after iteration t + 1; the logits columns become K P.
template <class A>
void log_forward(Problem<A>& problem, A* history, Buffer<A>& scratch) {
  const int64_t clusters = problem.clusters(), num_iters = problem.transport().num_iters;
  const A target = std::log(static_cast<A>(problem.rows()) / static_cast<A>(clusters));
  A* start = scratch.reserve(4 * clusters);
  A* sums = start + clusters;
  for (int64_t j = 0; j < clusters; ++j) start[j] = 0;
  const A* g = start;
  for (int64_t t = 0; t < num_iters; ++t) {
    if (t > 0) g = history + (t - 1) * clusters;
    if (!fused_column_sums(problem, g, sums)) {
      log_column_sums(problem, g, sums, sums + clusters);
    }
    for (int64_t j = 0; j < clusters; ++j) history[t * clusters + j] = g[j] + target - sums[j];
  }
  log_finish(problem, g, sums);
}

// One pass of log_backward over a block, for an iteration from the potentials `before` to `after`;
// partial[j] = the block's part of the next dg_j.
template <class A>
struct LogBackwardPass {
  Problem<A>& problem;
  const A* before;
  const A* after;
  const A* gradient;  // dg
  bool first;         // starts W and dg; the iterations T .. 1 follow
  bool last_iteration;
  A target;  // log(n / K)

  // R and 1/S may both be computed alone.
  bool fused() const {
    bool fits = problem.clusters() <= kFusedClusters;
    for (int64_t j = 0; fits && j < problem.clusters(); ++j) {
      fits = after[j] - before[j] - target < kFusedLog<A>;
    }
    return fits;
  }

  void run_fused(int64_t block, A* partial) const {
    const int64_t clusters = problem.clusters(), stride = problem.stride();
    const A* logits = problem.logits(block);
    A* values = problem.values(block);
    A* weights = problem.weights(block);
    Vec<A> r[kFusedClusters], total[kFusedClusters];
    A inverse[kFusedClusters];  // 1 / S_j
    for (int64_t j = 0; j < clusters; ++j) {
      total[j] = Vec<A>{};
      inverse[j] = std::exp(after[j] - before[j] - target);
    }
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      row_softmax<A>(logits + u, stride, clusters, before, r, false);
      Vec<A> df = {};
      for (int64_t j = 0; j < clusters; ++j) {
        A* value = values + j * stride + u;
        const Vec<A> q = r[j] * inverse[j];
        if (first) {
          const Vec<A> w = load(value) * q / static_cast<A>(clusters);
          store(weights + j * stride + u, q);
          store(value, w);
          total[j] += select<A>(live, w, Vec<A>{});
        } else {
          if (last_iteration) df += load(value);
          df -= q * gradient[j];
        }
      }
      for (int64_t j = 0; !first && j < clusters; ++j) {
        A* value = values + j * stride + u;
        const Vec<A> back = r[j] * df;
        store(value, load(value) - r[j] * (inverse[j] * gradient[j]) - back);
        total[j] -= select<A>(live, back, Vec<A>{});
      }
    });
    for (int64_t j = 0; j < clusters; ++j) partial[j] = reduce_add<A>(total[j]);
  }

  // Q_uj = exp(L_uj + g_j^t - lse_u + log(K / n)) as one exponential.
  void run_in_logs(int64_t block, A* partial) const {
    const int64_t clusters = problem.clusters(), stride = problem.stride();
    fill_lse(problem, block, before);
    const int64_t count = problem.block_rows(block);
    const A* logits = problem.logits(block);
    const A* lse = problem.lse(block);
    A* values = problem.values(block);
    A* weights = problem.weights(block);
    const auto plan = [&](int64_t u, int64_t j) {
      return vexp<A>(load(logits + j * stride + u) + (after[j] - target) - load(lse + u));
    };
    for (int64_t j = 0; j < clusters; ++j) partial[j] = 0;
    for (int64_t j = 0; first && j < clusters; ++j) {
      Vec<A> total = {};
      for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
        const Vec<A> q = plan(u, j);
        const Vec<A> w = load(values + j * stride + u) * q / static_cast<A>(clusters);
        store(weights + j * stride + u, q);
        store(values + j * stride + u, w);
        total += select<A>(live, w, Vec<A>{});
      });
      partial[j] = reduce_add<A>(total);
    }
    if (first) return;
    for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
      Vec<A> df = {};
      for (int64_t j = 0; j < clusters; ++j) {
        if (last_iteration) df += load(values + j * stride + u);
        df -= plan(u, j) * gradient[j];
      }
      for (int64_t j = 0; j < clusters; ++j) {
        const Vec<A> r = vexp<A>(load(logits + j * stride + u) + before[j] - load(lse + u)) * df;
        A* value = values + j * stride + u;
        store(value, load(value) - plan(u, j) * gradient[j] - r);
        partial[j] -= reduce_add<A>(select<A>(live, r, Vec<A>{}));
      }
    });
  }
};

// values: dP in, dL out; weights: K P out. With Q_uj = R_uj / S_j (K P at T):
//   start:  W = P dP, dg_j = sum_u W_uj;  then for t = T .. 1:
//   df_u = [t = T] sum_j W_uj - sum_j Q_uj dg_j;  dL_uj -= Q_uj dg_j + R_uj df_u;  dg_j <- -sum_u
//   R_uj df_u
template <class A>
void log_backward(Problem<A>& problem, const A* history, Buffer<A>& scratch) {
  const int64_t clusters = problem.clusters(), num_iters = problem.transport().num_iters;
  const A target = std::log(static_cast<A>(problem.rows()) / static_cast<A>(clusters));
  A* start = scratch.reserve(3 * clusters);
  A* gradient = start + clusters;
  A* next = gradient + clusters;
  for (int64_t j = 0; j < clusters; ++j) start[j] = 0;
  for (int64_t t = num_iters; t >= 0; --t) {
    const bool first = t == num_iters;
    const int64_t iteration = first ? num_iters - 1 : t;
    const A* after = history + iteration * clusters;
    const A* before = iteration == 0 ? start : after - clusters;
    const LogBackwardPass<A> pass{
        problem, before, after, gradient, first, iteration == num_iters - 1, target};
    const bool fused = pass.fused();
    problem.sum_blocks(clusters, next, [&](int64_t block, A* partial) {
      fused ? pass.run_fused(block, partial) : pass.run_in_logs(block, partial);
    });
    for (int64_t j = 0; j < clusters; ++j) gradient[j] = next[j];
  }
}

}  // namespace dcgnn::cpu::DCGNN_ISA
