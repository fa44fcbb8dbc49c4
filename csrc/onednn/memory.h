// Memory for packed weights, scratch and arenas: blocks out of large regions on huge pages.
//
// oneDNN asks for scratch at each execution of a partition and gives it back at its end; with malloc, that is a fresh
// set of zeroed pages each time for every partition with a few megabytes inside. And a model's weights lie in hundreds
// of blocks of less than a huge page: in 4 KiB pages of their own, reading them misses the TLB all the way.
#pragma once

#include <cstddef>
#include <new>

namespace edgeweave::onednn {

// Null if there is no memory. Any thread may call either; alignment is a power of two.
void* allocate(size_t size, size_t alignment);
void deallocate(void* memory);

// Memory on huge pages that its owner gives back, aligned to a cache line.
class Block {
 public:
  explicit Block(size_t bytes) : data_(allocate(bytes, 64)) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { deallocate(data_); }
  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

// Bytes of the regions that are held, and of the blocks that are in use.
struct MemoryUse {
  size_t held;
  size_t used;
};
MemoryUse memory_use();

}  // namespace edgeweave::onednn
