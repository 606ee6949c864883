// Sinkhorn to convergence for any K, and its implicit gradient.
//
// Converged: S_j(g) = sum_u R_uj = n / K for every column. S is the gradient of a convex function
// of g with the Hessian J = sum_u (diag(R_u) - R_u R_u^T), singular along (1, .., 1) only: one
// potential is kept fixed.
#pragma once

#include <cmath>

#include "log_sinkhorn.h"

namespace dcgnn::cpu::DCGNN_ISA {

// Solves (J + floor) x = rhs for a symmetric positive semidefinite J [K, K] with x_{K-1} = 0, by
// LDL^T in place. The floor is the rounding noise of J: where rows are saturated J carries no
// information below it, and x stays bounded.
inline void solve_gauge_fixed(double* hessian, double* rhs, int64_t clusters, double floor) {
  const int64_t size = clusters - 1;
  for (int64_t k = 0; k < size; ++k) hessian[k * clusters + k] += floor;
  for (int64_t k = 0; k < size; ++k) {
    const double* row = hessian + k * clusters;
    for (int64_t i = k + 1; i < size; ++i) {
      double* other = hessian + i * clusters;
      const double factor = other[k] / row[k];
      for (int64_t c = k + 1; c < size; ++c) other[c] -= factor * row[c];
      rhs[i] -= factor * rhs[k];
    }
  }
  rhs[size] = 0;
  for (int64_t k = size - 1; k >= 0; --k) {
    const double* row = hessian + k * clusters;
    double sum = rhs[k];
    for (int64_t c = k + 1; c < size; ++c) sum -= row[c] * rhs[c];
    rhs[k] = sum / row[k];
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

// Climbs the concave dual D(g) = mean_j g_j - mean_u lse_u(g) to its top, where every column sum is
// n / K. Each iteration takes the Sinkhorn step or the Newton step (a quarter or the whole of it,
// never longer than kLongestStep), whichever raises D most; Newton's also when it lowers the error,
// the largest |log column sum - log(n / K)|, since D is flat near its top.
template <class A>
class Climb {
 public:
  Climb(Problem<A>& problem, Buffer<A>& scratch, Buffer<double>& system)
      : problem_(problem),
        clusters_(problem.clusters()),
        target_(std::log(static_cast<A>(problem.rows()) / static_cast<A>(clusters_))),
        floor_(std::numeric_limits<A>::epsilon() * static_cast<double>(problem.rows())) {
    sums_ = scratch.reserve(clusters_ * clusters_ + 6 * clusters_);
    parts_ = sums_ + clusters_;
    trial_ = parts_ + 2 * clusters_;
    next_ = trial_ + clusters_;
    hessian_ = next_ + clusters_;
    matrix_ = system.reserve(clusters_ * clusters_ + clusters_);
    step_ = matrix_ + clusters_ * clusters_;
  }

  // Log column sums at the g of the last evaluation.
  const A* sums() const { return sums_; }

  struct Height {
    A dual;
    A error;
  };

  Height evaluate(const A* g) {
    log_column_sums(problem_, g, sums_, parts_);
    A total = 0;
    problem_.sum_blocks(1, &total, [&](int64_t block, A* partial) {
      Vec<A> sum = {};
      const A* lse = problem_.lse(block);
      for_each_vector<A>(problem_.block_rows(block), [&](int64_t u, Mask<A> live) {
        sum += select<A>(live, load(lse + u), Vec<A>{});
      });
      *partial = reduce_add<A>(sum);
    });
    A mean = 0, error = 0;
    for (int64_t j = 0; j < clusters_; ++j) {
      const A difference = std::fabs(sums_[j] - target_);
      error = difference > error ? difference : error;
      mean += g[j] / static_cast<A>(clusters_);
    }
    return {mean - total / static_cast<A>(problem_.rows()), error};
  }

  void run(A* g, int64_t max_iters, double tol) {
    constexpr A kNoise = 4 * std::numeric_limits<A>::epsilon();
    Height best = evaluate(g);
    for (int64_t iteration = 0, waited = 0; iteration < max_iters && waited < kPatience;
         ++iteration) {
      const Height here = evaluate(g);
      if (here.error <= kNoise) return;
      const double length = newton_step(g);
      for (int64_t j = 0; j < clusters_; ++j) next_[j] = g[j] + target_ - sums_[j];
      A highest = evaluate(next_).dual;
      constexpr double kFractions[] = {0.25, 1};
      for (const double fraction : kFractions) {
        const double share = fraction * (length > kLongestStep ? kLongestStep / length : 1.);
        for (int64_t j = 0; j < clusters_; ++j) {
          trial_[j] = g[j] + static_cast<A>(share * step_[j]);
        }
        const Height there = evaluate(trial_);
        if (there.dual > highest || there.error < here.error) {
          highest = there.dual > highest ? there.dual : highest;
          for (int64_t j = 0; j < clusters_; ++j) next_[j] = trial_[j];
        }
      }
      for (int64_t j = 0; j < clusters_; ++j) g[j] = next_[j];
      if (length <= tol) return;
      const Height now = evaluate(g);
      const bool improved =
          now.error < best.error || now.dual > best.dual + kNoise * std::fabs(now.dual);
      best = {now.dual > best.dual ? now.dual : best.dual,
              now.error < best.error ? now.error : best.error};
      waited = improved ? 0 : waited + 1;
    }
  }

 private:
  static constexpr double kLongestStep = 5;
  // Iterations without any gain after which the precision is used up.
  static constexpr int64_t kPatience = 20;

  // step = J^-1 (n / K - column sums) at the g of the last evaluation; its largest entry.
  double newton_step(const A* g) {
    sum_hessian(problem_, g, false, A(0), hessian_);
    for (int64_t k = 0; k < clusters_ * clusters_; ++k) {
      matrix_[k] = static_cast<double>(hessian_[k]);
    }
    for (int64_t j = 0; j < clusters_; ++j) {
      step_[j] = std::exp(static_cast<double>(target_)) - std::exp(static_cast<double>(sums_[j]));
    }
    solve_gauge_fixed(matrix_, step_, clusters_, floor_);
    double longest = 0;
    for (int64_t j = 0; j < clusters_; ++j) {
      const double length = std::fabs(step_[j]);
      longest = length > longest ? length : longest;
    }
    return longest;
  }

  Problem<A>& problem_;
  int64_t clusters_;
  A target_;
  double floor_;
  A *sums_, *parts_, *trial_, *next_, *hessian_;
  double *matrix_, *step_;
};

template <class A>
void scale_logits(Problem<A>& problem, A factor) {
  problem.for_each_block([&](int64_t block) {
    for (int64_t j = 0; j < problem.clusters(); ++j) {
      A* column = problem.logits(block) + j * problem.stride();
      for_each_vector<A>(problem.block_rows(block),
                         [&](int64_t u, Mask<A>) { store(column + u, load(column + u) * factor); });
    }
  });
}

// The largest difference of two logits in one row.
template <class A>
A widest_row(Problem<A>& problem) {
  A widest = 0;
  problem.fold_blocks(
      1, &widest,
      [&](int64_t block, A* partial) {
        const A* logits = problem.logits(block);
        Vec<A> most = {};
        for_each_vector<A>(problem.block_rows(block), [&](int64_t u, Mask<A> live) {
          Vec<A> high = load(logits + u), low = -high;
          for (int64_t j = 1; j < problem.clusters(); ++j) {
            const Vec<A> value = load(logits + j * problem.stride() + u);
            high = vmax<A>(value, high);
            low = vmax<A>(-value, low);
          }
          most = vmax<A>(select<A>(live, high + low, Vec<A>{}), most);
        });
        *partial = reduce_max<A>(most);
      },
      [](A* total, const A* partial) { *total = *partial > *total ? *partial : *total; });
  return widest;
}

// potentials[j] = g_j at convergence; the logits columns become K P. From afar both Sinkhorn and
// Newton advance by a bounded step, so sharp problems are approached by doubling the logits from a
// smooth start: powers of two, so that the logits come back unchanged.
template <class A>
void log_converge(Problem<A>& problem, A* g, Buffer<A>& scratch, Buffer<double>& system) {
  constexpr A kSmooth = 8;
  constexpr int64_t kItersOfDoubling = 8;
  Climb<A> climb(problem, scratch, system);
  const double tol = problem.transport().tol;
  for (int64_t j = 0; j < problem.clusters(); ++j) g[j] = 0;
  int halvings = 0;
  for (A width = widest_row(problem); width > kSmooth; width /= 2) ++halvings;
  if (halvings > 0) scale_logits(problem, std::ldexp(A(1), -halvings));
  for (; halvings > 0; --halvings) {
    climb.run(g, kItersOfDoubling, tol);
    scale_logits(problem, A(2));
    for (int64_t j = 0; j < problem.clusters(); ++j) g[j] *= 2;
  }
  climb.run(g, problem.transport().max_iters, tol);
  climb.evaluate(g);  // lse and sums of the final g
  log_finish(problem, g, climb.sums());
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
  solve_gauge_fixed(matrix, matrix + clusters * clusters, clusters,
                    std::numeric_limits<A>::epsilon() * static_cast<double>(problem.rows()));
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
