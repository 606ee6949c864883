#include "bindings/memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <list>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace dcgnn {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kLargeBytes = kHugePage;

struct Block {
  void* data;
  size_t bytes;
};

Block allocate_block(size_t bytes) {
  const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* data = std::aligned_alloc(kHugePage, rounded);
  if (data == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data, rounded, MADV_HUGEPAGE);  // advice only: where it is not taken nothing is lost
#endif
  return {data, rounded};
}

// An eighth of the machine's memory, at most 2 GiB; DCGNN_KEEP_MB sets another limit, 0 keeps
// nothing.
size_t keep_limit() {
  if (const char* text = std::getenv("DCGNN_KEEP_MB")) {
    const long long megabytes = std::atoll(text);
    return megabytes > 0 ? static_cast<size_t>(megabytes) << 20 : 0;
  }
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  const size_t most = size_t{2} << 30;
  if (pages <= 0 || page <= 0) return most;
  const size_t share = static_cast<size_t>(pages) / 8 * static_cast<size_t>(page);
  return share < most ? share : most;
}

class KeptPages final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Block* block = new Block(take(bytes));
    return {block->data, block, &KeptPages::give_back, c10::Device(c10::kCPU)};
  }
  // The deleter needs the block's size, not its address alone.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  int64_t kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(kept_);
  }

  int64_t release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t before = kept_;
    shrink_to(0);
    return static_cast<int64_t>(before);
  }

 private:
  // A lock that is not free at once is not waited for: whoever held it may not exist any more after
  // a fork.
  Block take(size_t bytes) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      auto best = blocks_.end();
      for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
        const bool fits = it->bytes >= bytes && it->bytes <= bytes + bytes / 8 + kHugePage;
        if (fits && (best == blocks_.end() || it->bytes <= best->bytes)) best = it;
      }
      if (best != blocks_.end()) {
        const Block block = *best;
        kept_ -= block.bytes;
        blocks_.erase(best);
        return block;
      }
    }
    return allocate_block(bytes);
  }

  void keep(Block block) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || block.bytes > limit_) {
      std::free(block.data);
      return;
    }
    shrink_to(limit_ - block.bytes);
    blocks_.push_back(block);
    kept_ += block.bytes;
  }

  void shrink_to(size_t limit) {
    while (kept_ > limit) {
      kept_ -= blocks_.front().bytes;
      std::free(blocks_.front().data);
      blocks_.pop_front();
    }
  }

  static void give_back(void* context);

  std::mutex mutex_;
  std::list<Block> blocks_;  // oldest first
  size_t kept_ = 0;
  const size_t limit_ = keep_limit();
};

KeptPages& pages() {
  static KeptPages* const kPages = new KeptPages;  // never destroyed: tensors may outlive statics
  return *kPages;
}

void KeptPages::give_back(void* context) {
  Block* block = static_cast<Block*>(context);
  pages().keep(*block);
  delete block;
}

}  // namespace

at::Tensor empty_output(at::IntArrayRef shape, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(shape, c10::elementSize(dtype));
  if (bytes < kLargeBytes) return at::empty(shape, options);
  at::Tensor out = at::detail::empty_generic(
      shape, &pages(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory() &&
      c10::isFloatingType(dtype)) {
    out.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return out;
}

int64_t kept_bytes() { return pages().kept(); }

int64_t release_kept_memory() { return pages().release(); }

}  // namespace dcgnn
