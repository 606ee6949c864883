// The kernels of the instruction set that this file is compiled for, and their table.
#pragma once

#include "types.h"

#ifndef DCGNN_ISA
#define DCGNN_ISA baseline
#endif

namespace dcgnn::cpu::DCGNN_ISA {

bool local_sinkhorn(const SinkhornForward& call, const Executor& executor);
void local_sinkhorn_backward(const SinkhornBackward& call, const Executor& executor);
bool global_sinkhorn(const SinkhornForward& call, const Executor& executor);
void global_sinkhorn_backward(const SinkhornBackward& call, const Executor& executor);
void cluster_scatter(const ScatterForward& call, const Executor& executor);
void cluster_scatter_backward(const ScatterBackward& call, const Executor& executor);
void local_centroids(const CentroidsForward& call, const Executor& executor);
void local_centroids_backward(const CentroidsBackward& call, const Executor& executor);
void linear(const LinearForward& call, const Executor& executor);
void outer_products(const OuterProducts& call, const Executor& executor);

const KernelTable& table();

}  // namespace dcgnn::cpu::DCGNN_ISA
