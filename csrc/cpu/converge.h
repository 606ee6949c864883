// Sinkhorn to convergence for any K, and its implicit gradient.
//
// Converged: S_j(g) = sum_u R_uj = n / K for every column. S is the gradient of a convex function
// of g with the Hessian J = sum_u (diag(R_u) - R_u R_u^T), singular along (1, .., 1) only: one
// potential is kept fixed.
#pragma once

#include "log_sinkhorn.h"

namespace dcgnn::cpu::DCGNN_ISA {

// Solves J x = rhs for a symmetric positive semidefinite J [K, K] with x_{K-1} = 0, by LDL^T in
// place. A direction without curvature (its rows are saturated) gets 0: nothing depends on it.
inline void solve_gauge_fixed(double* hessian, double* rhs, int64_t clusters) {
  const int64_t size = clusters - 1;
  for (int64_t k = 0; k < size; ++k) {
    double* row = hessian + k * clusters;
    const double pivot = row[k];
    const bool flat = !(pivot > 1e-300);
    for (int64_t i = k + 1; i < size; ++i) {
      double* other = hessian + i * clusters;
      const double factor = flat ? 0. : other[k] / pivot;
      for (int64_t c = k + 1; c < size; ++c) other[c] -= factor * row[c];
      rhs[i] -= factor * rhs[k];
    }
    if (flat) row[k] = 0;
  }
  rhs[size] = 0;
  for (int64_t k = size - 1; k >= 0; --k) {
    const double* row = hessian + k * clusters;
    double sum = rhs[k];
    for (int64_t c = k + 1; c < size; ++c) sum -= row[c] * rhs[c];
    rhs[k] = row[k] > 0 ? sum / row[k] : 0.;
  }
}

// J at g, whose lse is in place: out[j * K + k]. `direct`, if given, also gets
// out[K * K + j] = sum_u R_uj (v_uj - <R_u, v_u>) for v = factor * values.
template <class A>
void sum_hessian(Problem<A>& problem, const A* g, bool direct, A factor, A* out) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  const int64_t width = clusters * clusters + clusters;
  problem.sum_blocks(width, out, [&](int64_t block, A* partial) {
    const A* logits = problem.logits(block);
    const A* lse = problem.lse(block);
    Buffer<Vec<A>> buffer;
    Vec<A>* r = buffer.reserve(clusters + width);
    Vec<A>* total = r + clusters;
    for (int64_t w = 0; w < width; ++w) total[w] = Vec<A>{};
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
      Vec<A> mean = {};
      for (int64_t j = 0; j < clusters; ++j) {
        r[j] = vexp<A>(load(logits + j * stride + u) + g[j] - load(lse + u));
        r[j] = select<A>(live, r[j], Vec<A>{});
        if (direct) {
          const Vec<A> v = load(problem.values(block) + j * stride + u) * factor;
          mean += r[j] * select<A>(live, v, Vec<A>{});
        }
      }
      for (int64_t j = 0; j < clusters; ++j) {
        Vec<A> others = {};
        for (int64_t k = 0; k < clusters; ++k) {
          if (k == j) continue;
          total[j * clusters + k] -= r[j] * r[k];
          others += r[k];
        }
        total[j * clusters + j] += r[j] * others;
        if (direct) {
          const Vec<A> v = load(problem.values(block) + j * stride + u) * factor;
          total[clusters * clusters + j] += r[j] * (select<A>(live, v, Vec<A>{}) - mean);
        }
      }
    });
    for (int64_t w = 0; w < width; ++w) partial[w] = reduce_add<A>(total[w]);
  });
}

// Sinkhorn iterations until every log column sum is within tol of log(n / K), at most max_iters;
// then Newton steps with backtracking, as long as they help. potentials[j] = g_j; the logits
// columns become K P.
template <class A>
void log_converge(Problem<A>& problem, A* g, Buffer<A>& scratch, Buffer<double>& system) {
  const int64_t clusters = problem.clusters();
  const A target = std::log(static_cast<A>(problem.rows()) / static_cast<A>(clusters));
  A* sums = scratch.reserve(clusters * clusters + 6 * clusters);
  A* parts = sums + clusters;
  A* trial = parts + 2 * clusters;
  A* hessian = trial + clusters;
  double* matrix = system.reserve(clusters * clusters + clusters);
  double* step = matrix + clusters * clusters;
  const auto error_at = [&](const A* at) {
    log_column_sums(problem, at, sums, parts);
    A error = 0;
    for (int64_t j = 0; j < clusters; ++j) {
      const A difference = std::fabs(sums[j] - target);
      error = difference > error ? difference : error;
    }
    return error;
  };
  const A epsilon = std::numeric_limits<A>::epsilon();
  const A tol = static_cast<A>(problem.transport().tol);
  for (int64_t j = 0; j < clusters; ++j) g[j] = 0;
  A error = error_at(g);
  for (int64_t t = 0; t < problem.transport().max_iters && error > tol; ++t) {
    for (int64_t j = 0; j < clusters; ++j) g[j] += target - sums[j];
    error = error_at(g);
  }
  constexpr int kNewtonSteps = 30, kHalvings = 8;
  for (int newton = 0; newton < kNewtonSteps && error > 4 * epsilon; ++newton) {
    sum_hessian(problem, g, false, A(0), hessian);
    for (int64_t k = 0; k < clusters * clusters; ++k) matrix[k] = static_cast<double>(hessian[k]);
    for (int64_t j = 0; j < clusters; ++j) {
      step[j] = std::exp(static_cast<double>(target)) - std::exp(static_cast<double>(sums[j]));
    }
    solve_gauge_fixed(matrix, step, clusters);
    A length = 1, best = error;
    for (int halving = 0; halving < kHalvings; ++halving, length /= 2) {
      for (int64_t j = 0; j < clusters; ++j) trial[j] = g[j] + length * static_cast<A>(step[j]);
      best = error_at(trial);
      if (best < error) break;
    }
    if (!(best < error)) break;
    for (int64_t j = 0; j < clusters; ++j) g[j] = trial[j];
    error = best;
  }
  error_at(g);  // lse and sums of the accepted g
  log_finish(problem, g, sums);
}

// values: dP in, dL out; weights: K P out. With v = dP / n and dg = sum_u R_u (v_u - <R_u, v_u>):
//   J y = dg;   dL_uj = R_uj (b_uj - <R_u, b_u>),   b_u = v_u - y.
template <class A>
void log_converged_backward(Problem<A>& problem, const A* g, Buffer<A>& scratch,
                            Buffer<double>& system) {
  const int64_t clusters = problem.clusters(), stride = problem.stride();
  const A inverse_rows = A(1) / static_cast<A>(problem.rows());
  A* sums = scratch.reserve(clusters * clusters + 5 * clusters);
  A* parts = sums + clusters;
  A* y = parts + 2 * clusters;
  A* hessian = y + clusters;
  double* matrix = system.reserve(clusters * clusters + clusters);
  log_column_sums(problem, g, sums, parts);
  sum_hessian(problem, g, true, inverse_rows, hessian);
  for (int64_t k = 0; k < clusters * (clusters + 1); ++k)
    matrix[k] = static_cast<double>(hessian[k]);
  solve_gauge_fixed(matrix, matrix + clusters * clusters, clusters);
  A* inverse_sums = parts;
  for (int64_t j = 0; j < clusters; ++j) {
    y[j] = static_cast<A>(matrix[clusters * clusters + j]);
    inverse_sums[j] = std::exp(-sums[j]);
  }
  problem.for_each_block([&](int64_t block) {
    const A* logits = problem.logits(block);
    const A* lse = problem.lse(block);
    A* values = problem.values(block);
    A* weights = problem.weights(block);
    for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A>) {
      Vec<A> mean = {};
      for (int64_t j = 0; j < clusters; ++j) {
        const Vec<A> r = vexp<A>(load(logits + j * stride + u) + g[j] - load(lse + u));
        const Vec<A> b = load(values + j * stride + u) * inverse_rows - y[j];
        mean += r * b;
        store(weights + j * stride + u, r);
        store(values + j * stride + u, b);
      }
      for (int64_t j = 0; j < clusters; ++j) {
        const Vec<A> r = load(weights + j * stride + u);
        store(values + j * stride + u, r * (load(values + j * stride + u) - mean));
        store(weights + j * stride + u, r * inverse_sums[j]);
      }
    });
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
