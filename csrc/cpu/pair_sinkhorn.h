// Sinkhorn for K = 2, where a problem is one-dimensional.
//
// With s_u = L_u1 - L_u2 and t = g_1 - g_2 a row is R_u1 = sigmoid(s_u + t), R_u2 = sigmoid(-s_u -
// t), its column sums are S_j = sum_u R_uj, and one iteration is g_j <- g_j + log(n / (2 S_j)). The
// plan after T iterations is P_uj = R_uj / (2 S_j), taken at the g before the last step: its
// columns are exact.
//
// The T iterations here work on exp(s), which needs |s| <= kPairPeak; log_sinkhorn.h takes the
// rest. The converged problem is a scalar root, sum_u R_u1 = n/2, for any s.
#pragma once

#include "problem.h"
#include "rows.h"

namespace dcgnn::cpu::DCGNN_ISA {

// t lies in [-max s, -min s], so that |s + t| <= 2 kPairPeak, and 1 / S_j stays far from overflow.
template <class A>
constexpr A kPairPeak = sizeof(A) == 4 ? A(20) : A(150);

// history[t * 2 + j] = g_j after iteration t + 1; the logits columns become K P.
template <class A>
void pair_forward(Problem<A>& problem, A* history) {
  const int64_t num_iters = problem.transport().num_iters, stride = problem.stride();
  const A rows = static_cast<A>(problem.rows());
  A potential[2] = {1, 1};  // exp(g)
  A ratio = 1, sums[2] = {1, 1};
  for (int64_t t = 0; t < num_iters; ++t) {
    ratio = potential[0] / potential[1];
    problem.sum_blocks(2, sums, [&](int64_t block, A* partial) {
      A* column = problem.logits(block);
      Vec<A> first = {}, second = {};
      for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
        Vec<A> weight = load(column + u);
        if (t == 0) {
          weight = vexp<A>(weight);
          store(column + u, weight);
        }
        weight *= ratio;
        const Vec<A> r = select<A>(live, A(1) / (A(1) + weight), Vec<A>{});
        first += select<A>(live, weight * r, Vec<A>{});
        second += r;
      });
      partial[0] = reduce_add<A>(first);
      partial[1] = reduce_add<A>(second);
    });
    for (int j = 0; j < 2; ++j) {
      potential[j] *= rows / (A(2) * sums[j]);
      history[2 * t + j] = potential[j];
    }
  }
  for_each_slice<A, 1>(
      2 * num_iters, [&](auto slice) { slice.store(history, 0, vlog<A>(slice.load(history, 0))); });
  problem.for_each_block([&](int64_t block) {
    A* column = problem.logits(block);
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
      const Vec<A> weight = load(column + u) * ratio;
      const Vec<A> r = A(1) / (A(1) + weight);
      store(column + u, weight * r * (A(1) / sums[0]));
      store(column + stride + u, r * (A(1) / sums[1]));
    });
  });
}

// Column sums, and the slope sum_u R_u1 R_u2, at t.
template <class A>
void pair_sums(Problem<A>& problem, A t, A (&sums)[3]) {
  problem.sum_blocks(3, sums, [&](int64_t block, A* partial) {
    const A* column = problem.logits(block);
    Vec<A> first = {}, second = {}, slope = {};
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      Vec<A> r1, r2;
      sigmoid_pair<A>(load(column + u) + t, r1, r2);
      first += select<A>(live, r1, Vec<A>{});
      second += select<A>(live, r2, Vec<A>{});
      slope += select<A>(live, r1 * r2, Vec<A>{});
    });
    partial[0] = reduce_add<A>(first);
    partial[1] = reduce_add<A>(second);
    partial[2] = reduce_add<A>(slope);
  });
}

// Newton on sum_u R_u1(t) = sum_u R_u2(t), which increases in t, kept inside a shrinking bracket by
// bisection. potentials[j] = g_j with g_1 + g_2 = 0; the logits columns become K P.
template <class A>
void pair_converge(Problem<A>& problem, A* potentials) {
  const int64_t stride = problem.stride();
  const A rows = static_cast<A>(problem.rows());
  A bracket[2];  // max s, max -s
  problem.fold_blocks(
      2, bracket,
      [&](int64_t block, A* partial) {
        const A* column = problem.logits(block);
        Vec<A> most = splat<A>(-kLogitLimit<A>), least = most;
        for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
          const Vec<A> s = load(column + u);
          most = select<A>(live & (s > most), s, most);
          least = select<A>(live & (-s > least), -s, least);
        });
        partial[0] = reduce_max<A>(most);
        partial[1] = reduce_max<A>(least);
      },
      [](A* total, const A* partial) {
        for (int w = 0; w < 2; ++w) total[w] = partial[w] > total[w] ? partial[w] : total[w];
      });
  A low = -bracket[0], high = bracket[1], sums[3];
  A t = low <= 0 && 0 <= high ? A(0) : low + (high - low) / 2;
  const A enough = A(2) * std::numeric_limits<A>::epsilon() * rows;
  constexpr int kMaxSteps = 200;
  for (int step = 0;; ++step) {
    pair_sums(problem, t, sums);
    const A excess = (sums[0] - sums[1]) / 2;
    if (std::fabs(excess) <= enough || step == kMaxSteps) break;
    (excess > 0 ? high : low) = t;
    A next = t - excess / sums[2];
    if (!(next > low && next < high)) next = low + (high - low) / 2;
    if (next == t) break;
    t = next;
  }
  potentials[0] = t / 2;
  potentials[1] = -t / 2;
  problem.for_each_block([&](int64_t block) {
    A* column = problem.logits(block);
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
      Vec<A> r1, r2;
      sigmoid_pair<A>(load(column + u) + t, r1, r2);
      store(column + u, r1 / sums[0]);
      store(column + stride + u, r2 / sums[1]);
    });
  });
}

// values: dP in, dL out; weights: K P out. The logits columns keep s.
//   start:  W = P dP, dg_j = sum_u W_uj;  then for t = T .. 1, with Q_uj = R_uj / S_j (Q = K P at
//   T): df_u = [t = T] sum_j W_uj - sum_j Q_uj dg_j;  dL_uj -= Q_uj dg_j + R_uj df_u;  dg_j <-
//   -sum_u R_uj df_u
template <class A>
void pair_backward(Problem<A>& problem, const A* history) {
  const int64_t num_iters = problem.transport().num_iters, stride = problem.stride();
  const A rows = static_cast<A>(problem.rows());
  const A start[2] = {0, 0};
  A gradient[2], inverse[2];
  for (int64_t t = num_iters; t >= 0; --t) {
    // The pass t = T (counted from 0) starts W and dg; the passes below are the iterations T .. 1.
    const bool first_pass = t == num_iters;
    const int64_t iteration = first_pass ? num_iters - 1 : t;
    const A* after = history + 2 * iteration;
    const A* before = iteration == 0 ? start : after - 2;
    for (int j = 0; j < 2; ++j) inverse[j] = A(2) / rows * std::exp(after[j] - before[j]);
    const A shift = before[0] - before[1];
    const bool last_iteration = iteration == num_iters - 1;
    A sums[2];
    problem.sum_blocks(2, sums, [&](int64_t block, A* partial) {
      const A* column = problem.logits(block);
      A* values = problem.values(block);
      A* weights = problem.weights(block);
      Vec<A> total[2] = {};
      for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
        Vec<A> r[2];
        sigmoid_pair<A>(load(column + u) + shift, r[0], r[1]);
        const Vec<A> q[2] = {r[0] * inverse[0], r[1] * inverse[1]};
        Vec<A> w[2] = {load(values + u), load(values + stride + u)};
        if (first_pass) {
          for (int j = 0; j < 2; ++j) {
            store(weights + j * stride + u, q[j]);
            w[j] *= q[j] * A(0.5);
            total[j] += select<A>(live, w[j], Vec<A>{});
          }
        } else {
          Vec<A> df = -(q[0] * gradient[0] + q[1] * gradient[1]);
          if (last_iteration) df += w[0] + w[1];
          for (int j = 0; j < 2; ++j) {
            w[j] -= q[j] * gradient[j] + r[j] * df;
            total[j] -= select<A>(live, r[j] * df, Vec<A>{});
          }
        }
        for (int j = 0; j < 2; ++j) store(values + j * stride + u, w[j]);
      });
      for (int j = 0; j < 2; ++j) partial[j] = reduce_add<A>(total[j]);
    });
    for (int j = 0; j < 2; ++j) gradient[j] = sums[j];
  }
}

// The implicit gradient of the converged problem. With v = dP / n the direct part of dg_1 is
// sum_u R_u1 R_u2 (v_u1 - v_u2), and the constraint takes back its weighted mean y:
//   dL_u1 = R_u1 R_u2 (v_u1 - v_u2 - y) = -dL_u2,   y = sum(R_1 R_2 (v_1 - v_2)) / sum(R_1 R_2).
template <class A>
void pair_converged_backward(Problem<A>& problem, const A* potentials) {
  const int64_t stride = problem.stride();
  const A inverse_rows = A(1) / static_cast<A>(problem.rows());
  const A t = potentials[0] - potentials[1];
  A sums[4];  // S_1, S_2, sum R_1 R_2, sum R_1 R_2 (v_1 - v_2)
  problem.sum_blocks(4, sums, [&](int64_t block, A* partial) {
    const A* column = problem.logits(block);
    A* values = problem.values(block);
    Vec<A> total[4] = {};
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      Vec<A> r1, r2;
      sigmoid_pair<A>(load(column + u) + t, r1, r2);
      const Vec<A> v = (load(values + u) - load(values + stride + u)) * inverse_rows;
      store(values + u, v);
      const Vec<A> terms[4] = {r1, r2, r1 * r2, r1 * r2 * v};
      for (int k = 0; k < 4; ++k) total[k] += select<A>(live, terms[k], Vec<A>{});
    });
    for (int k = 0; k < 4; ++k) partial[k] = reduce_add<A>(total[k]);
  });
  const A y = sums[2] > 0 ? sums[3] / sums[2] : A(0);
  problem.for_each_block([&](int64_t block) {
    const A* column = problem.logits(block);
    A* values = problem.values(block);
    A* weights = problem.weights(block);
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
      Vec<A> r1, r2;
      sigmoid_pair<A>(load(column + u) + t, r1, r2);
      const Vec<A> gradient = r1 * r2 * (load(values + u) - y);
      store(values + u, gradient);
      store(values + stride + u, -gradient);
      store(weights + u, r1 / sums[0]);
      store(weights + stride + u, r2 / sums[1]);
    });
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
