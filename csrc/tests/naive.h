// The formulas as plain double loops over one transport problem: the oracle of the native tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/types.h"

namespace dcgnn::test {

using Doubles = std::vector<double>;

inline double log_sum_exp(const Doubles& x) {
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double value : x) sum += std::exp(value - most);
  return most + std::log(sum);
}

// n rows z [n, F], centroids c [K, F]; T iterations, forward and backward.
struct NaiveProblem {
  int64_t n, k, f, iters;
  double lam;
  cpu::CostScale cost_scale;
  Doubles z, c;

  Doubles cost, logits, plan, clusters;  // [n, K], [n, K], [n, K], [K, F]
  std::vector<Doubles> row, column;      // f^1 .. f^T and g^0 .. g^T
  double scale = 1;
  int64_t first_maximum = 0;

  void forward() {
    cost.assign(n * k, 0);
    for (int64_t u = 0; u < n; ++u) {
      for (int64_t j = 0; j < k; ++j) {
        for (int64_t d = 0; d < f; ++d) {
          const double difference = z[u * f + d] - c[j * f + d];
          cost[u * k + j] += difference * difference;
        }
      }
    }
    first_maximum = std::max_element(cost.begin(), cost.end()) - cost.begin();
    if (cost_scale == cpu::CostScale::kMax) scale = cost[first_maximum];
    if (cost_scale == cpu::CostScale::kMean) {
      scale = 0;
      for (const double m : cost) scale += m / static_cast<double>(n * k);
    }
    logits.assign(n * k, 0);
    for (int64_t e = 0; e < n * k; ++e) logits[e] = scale > 0 ? -lam * cost[e] / scale : 0;
    column.assign(1, Doubles(k, 0));
    row.clear();
    for (int64_t t = 0; t < iters; ++t) {
      Doubles next_row(n), next_column(k);
      for (int64_t u = 0; u < n; ++u) {
        Doubles x(k);
        for (int64_t j = 0; j < k; ++j) x[j] = logits[u * k + j] + column[t][j];
        next_row[u] = -std::log(static_cast<double>(n)) - log_sum_exp(x);
      }
      for (int64_t j = 0; j < k; ++j) {
        Doubles x(n);
        for (int64_t u = 0; u < n; ++u) x[u] = logits[u * k + j] + next_row[u];
        next_column[j] = -std::log(static_cast<double>(k)) - log_sum_exp(x);
      }
      row.push_back(next_row);
      column.push_back(next_column);
    }
    plan.assign(n * k, 0);
    clusters.assign(k * f, 0);
    for (int64_t u = 0; u < n; ++u) {
      for (int64_t j = 0; j < k; ++j) {
        plan[u * k + j] = std::exp(logits[u * k + j] + row[iters - 1][u] + column[iters][j]);
        for (int64_t d = 0; d < f; ++d) {
          clusters[j * f + d] += static_cast<double>(k) * plan[u * k + j] * z[u * f + d];
        }
      }
    }
  }

  // Adds to grad_z [n, F] and sets grad_c [K, F].
  void backward(const Doubles& grad_plan, const Doubles& grad_clusters, Doubles& grad_z,
                Doubles& grad_c) const {
    Doubles d_logits(n * k), d_row(n, 0), d_column(k, 0);
    for (int64_t u = 0; u < n; ++u) {
      for (int64_t j = 0; j < k; ++j) {
        double dp = grad_plan[u * k + j];
        for (int64_t d = 0; d < f; ++d) {
          dp += static_cast<double>(k) * z[u * f + d] * grad_clusters[j * f + d];
          grad_z[u * f + d] += static_cast<double>(k) * plan[u * k + j] * grad_clusters[j * f + d];
        }
        d_logits[u * k + j] = plan[u * k + j] * dp;
        d_row[u] += d_logits[u * k + j];
        d_column[j] += d_logits[u * k + j];
      }
    }
    for (int64_t t = iters - 1; t >= 0; --t) {
      Doubles next(k, 0);
      for (int64_t u = 0; u < n; ++u) {
        for (int64_t j = 0; j < k; ++j) {
          const double s = std::exp(logits[u * k + j] + row[t][u] + column[t + 1][j]) *
                           static_cast<double>(k) * d_column[j];
          d_logits[u * k + j] -= s;
          d_row[u] -= s;
        }
        for (int64_t j = 0; j < k; ++j) {
          const double r = std::exp(logits[u * k + j] + column[t][j] + row[t][u]) *
                           static_cast<double>(n) * d_row[u];
          d_logits[u * k + j] -= r;
          next[j] -= r;
        }
        d_row[u] = 0;
      }
      d_column = next;
    }
    Doubles d_cost(n * k, 0);
    double d_scale = 0;
    for (int64_t e = 0; scale > 0 && e < n * k; ++e) {
      d_cost[e] = -lam / scale * d_logits[e];
      d_scale += lam * cost[e] / (scale * scale) * d_logits[e];
    }
    if (cost_scale == cpu::CostScale::kMax) d_cost[first_maximum] += d_scale;
    if (cost_scale == cpu::CostScale::kMean) {
      for (double& d : d_cost) d += d_scale / static_cast<double>(n * k);
    }
    grad_c.assign(k * f, 0);
    for (int64_t u = 0; u < n; ++u) {
      for (int64_t j = 0; j < k; ++j) {
        for (int64_t d = 0; d < f; ++d) {
          const double slope = 2 * d_cost[u * k + j] * (z[u * f + d] - c[j * f + d]);
          grad_z[u * f + d] += slope;
          grad_c[j * f + d] -= slope;
        }
      }
    }
  }
};

}  // namespace dcgnn::test
