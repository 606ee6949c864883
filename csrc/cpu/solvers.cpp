// The solvers of all storage types, compiled in one place for the local and the global op.
#include "pair_transport.h"
#include "transport.h"

namespace dcgnn::cpu::DCGNN_ISA {

template class PairSolver<float>;
template class PairSolver<double>;
template class PairSolver<BFloat16>;
template class TransportSolver<float>;
template class TransportSolver<double>;
template class TransportSolver<BFloat16>;

}  // namespace dcgnn::cpu::DCGNN_ISA
