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

// history[t * 2 + j] = g_j after iteration t + 1; the logits columns become K P; sums[j] = S_j of
// the plan.
template <class A>
void pair_forward(Problem<A>& problem, A* history, A (&sums)[2]) {
  const int64_t num_iters = problem.transport().num_iters, stride = problem.stride();
  const A rows = static_cast<A>(problem.rows());
  A potential[2] = {1, 1};  // exp(g)
  A ratio = 1;              // exp(g_1 - g_2)
  for (int64_t t = 0; t < num_iters; ++t) {
    if (t > 0) ratio *= sums[1] / sums[0];
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
        const Vec<A> r = select<A>(live, reciprocal<A>(A(1) + weight), Vec<A>{});
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
  for_each_slice<A, 2>(2 * num_iters, [&](auto slice) {
    slice.write(history, [&](int v) { return vlog<A>(slice.load(history, v)); });
  });
  const A inverse[2] = {A(1) / sums[0], A(1) / sums[1]};
  problem.for_each_block([&](int64_t block) {
    A* column = problem.logits(block);
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
      const Vec<A> weight = load(column + u) * ratio;
      const Vec<A> r = reciprocal<A>(A(1) + weight);
      store(column + u, weight * r * inverse[0]);
      store(column + stride + u, r * inverse[1]);
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
void pair_converge(Problem<A>& problem, A* potentials, A (&plan_sums)[2]) {
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
  for (int j = 0; j < 2; ++j) plan_sums[j] = sums[j];
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

// g_j after k iterations, and S_j at that g, from the history of the iterations.
template <class A>
struct PairHistory {
  const A* values;
  A rows;
  A potential(int64_t k, int j) const { return k == 0 ? A(0) : values[2 * (k - 1) + j]; }
  A ratio(int64_t k) const { return std::exp(potential(k, 0) - potential(k, 1)); }
  A sum(int64_t k, int j) const {
    return rows / A(2) * std::exp(potential(k, j) - potential(k + 1, j));
  }
};

// values: the gradients a and b of K P_u1 and K P_u2 in, ds in the first column out; weights: K P
// out; sums as in pair_forward. The logits keep s in the first column and lose the second.
//
// With Q_j = R_j / S_j, at t = t_(T-1):  ds_u = Q_1 R_2 (a_u - sum(Q_1 a)) - Q_2 R_1 (b_u - sum(Q_2
// b)), and dt = sum(ds). Then t_(k+1) = t_k + log(S_2 / S_1) for k = T-2 .. 0, at t_k:
//   x_u = -dt (Q_1 R_2 + Q_2 R_1);  ds_u += x_u;  dt += sum(x).
template <class A>
void pair_backward(Problem<A>& problem, const A* history, A (&sums)[2]) {
  const int64_t num_iters = problem.transport().num_iters, stride = problem.stride();
  const PairHistory<A> past{history, static_cast<A>(problem.rows())};
  const A plan_ratio = past.ratio(num_iters - 1);
  for (int j = 0; j < 2; ++j) sums[j] = past.sum(num_iters - 1, j);
  const A inverse[2] = {A(1) / sums[0], A(1) / sums[1]};

  A means[2];  // sum(Q_1 a), sum(Q_2 b)
  problem.sum_blocks(2, means, [&](int64_t block, A* partial) {
    A* column = problem.logits(block);
    const A* values = problem.values(block);
    A* weights = problem.weights(block);
    Vec<A> first = {}, second = {};
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      const Vec<A> weight = vexp<A>(load(column + u));
      store(column + stride + u, weight);
      const Vec<A> r = reciprocal<A>(A(1) + weight * plan_ratio);
      const Vec<A> q1 = weight * plan_ratio * r * inverse[0], q2 = r * inverse[1];
      store(weights + u, q1);
      store(weights + stride + u, q2);
      first += select<A>(live, q1 * load(values + u), Vec<A>{});
      second += select<A>(live, q2 * load(values + stride + u), Vec<A>{});
    });
    partial[0] = reduce_add<A>(first);
    partial[1] = reduce_add<A>(second);
  });

  A shift_gradient = 0, moved = 0;  // dt, and what a pass adds to it
  for (int64_t k = num_iters - 1; k >= 0; --k) {
    const bool plan = k == num_iters - 1;
    const A ratio = past.ratio(k);
    const A both = A(1) / past.sum(k, 0) + A(1) / past.sum(k, 1);
    problem.sum_blocks(1, &moved, [&](int64_t block, A* partial) {
      const A* exponentials = problem.logits(block) + stride;
      A* values = problem.values(block);
      Vec<A> sum = {};
      for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
        const Vec<A> weight = load(exponentials + u) * ratio;
        const Vec<A> r2 = reciprocal<A>(A(1) + weight);
        const Vec<A> r1 = weight * r2;
        Vec<A> gradient;
        if (plan) {
          gradient = r1 * inverse[0] * r2 * (load(values + u) - means[0]) -
                     r2 * inverse[1] * r1 * (load(values + stride + u) - means[1]);
          store(values + u, gradient);
        } else {
          gradient = -shift_gradient * (r1 * r2 * both);
          store(values + u, load(values + u) + gradient);
        }
        sum += select<A>(live, gradient, Vec<A>{});
      });
      *partial = reduce_add<A>(sum);
    });
    shift_gradient += moved;
  }
}

// The same for the converged problem, by the implicit gradient: t must keep sum(R_1 - R_2) = 0,
//   ds_u = 2/n R_u1 R_u2 (a_u - b_u - y),   y = sum(R_1 R_2 (a - b)) / sum(R_1 R_2).
template <class A>
void pair_converged_backward(Problem<A>& problem, const A* potentials, A (&sums)[2]) {
  const int64_t stride = problem.stride();
  const A share = A(2) / static_cast<A>(problem.rows());
  const A t = potentials[0] - potentials[1];
  A totals[4];  // S_1, S_2, sum R_1 R_2, sum R_1 R_2 (a - b)
  problem.sum_blocks(4, totals, [&](int64_t block, A* partial) {
    const A* column = problem.logits(block);
    A* values = problem.values(block);
    Vec<A> total[4] = {};
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      Vec<A> r1, r2;
      sigmoid_pair<A>(load(column + u) + t, r1, r2);
      const Vec<A> v = load(values + u) - load(values + stride + u);
      store(values + u, v);
      const Vec<A> terms[4] = {r1, r2, r1 * r2, r1 * r2 * v};
      for (int k = 0; k < 4; ++k) total[k] += select<A>(live, terms[k], Vec<A>{});
    });
    for (int k = 0; k < 4; ++k) partial[k] = reduce_add<A>(total[k]);
  });
  for (int j = 0; j < 2; ++j) sums[j] = totals[j];
  const A y = totals[2] > 0 ? totals[3] / totals[2] : A(0);
  problem.for_each_block([&](int64_t block) {
    const A* column = problem.logits(block);
    A* values = problem.values(block);
    A* weights = problem.weights(block);
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
      Vec<A> r1, r2;
      sigmoid_pair<A>(load(column + u) + t, r1, r2);
      store(values + u, share * r1 * r2 * (load(values + u) - y));
      store(weights + u, r1 / totals[0]);
      store(weights + stride + u, r2 / totals[1]);
    });
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
