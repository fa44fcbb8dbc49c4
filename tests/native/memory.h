// Arrays that end exactly where they say, so that a read or write one byte too far ends the program.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace edgeweave::tests {

// Under AddressSanitizer a plain block, with its red zones on both sides. Otherwise the array ends at a page that
// cannot be touched (what else shows an overrun under qemu), in front of it are guard bytes.
class Block {
 public:
  explicit Block(size_t bytes) : bytes_(bytes) {
#if defined(__SANITIZE_ADDRESS__)
    base_ = std::malloc(bytes);
    data_ = base_;
#else
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t body = (bytes + kFront + page - 1) / page * page;
    mapped_ = body + page;
    base_ = map(body, page);
    data_ = static_cast<char*>(base_) + body - bytes;
    std::memset(static_cast<char*>(data_) - kFront, 0x5a, kFront);
#endif
    if (bytes > 0) std::memset(data_, 0xa5, bytes);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
#if defined(__SANITIZE_ADDRESS__)
    std::free(base_);
#else
    for (size_t i = 1; i <= kFront; ++i) {
      if (static_cast<unsigned char*>(data_)[-static_cast<ptrdiff_t>(i)] == 0x5a) continue;
      std::fprintf(stderr, "a write %zu bytes in front of an array of %zu bytes\n", i, bytes_);
      std::abort();
    }
    free_blocks()[mapped_].push_back(base_);
#endif
  }
  void* data() const { return data_; }

 private:
  static constexpr size_t kFront = 64;
  // Mappings are used again: millions of calls to mmap would take longer than the tests.
  static std::map<size_t, std::vector<void*>>& free_blocks() {
    static auto* blocks = new std::map<size_t, std::vector<void*>>();
    return *blocks;
  }
  static void* map(size_t body, size_t page) {
    std::vector<void*>& reusable = free_blocks()[body + page];
    if (!reusable.empty()) {
      void* block = reusable.back();
      reusable.pop_back();
      return block;
    }
    void* block = mmap(nullptr, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED || mprotect(static_cast<char*>(block) + body, page, PROT_NONE) != 0) {
      std::perror("mmap");
      std::exit(2);
    }
    return block;
  }
  size_t bytes_;
  [[maybe_unused]] size_t mapped_ = 0;
  void* base_ = nullptr;
  void* data_ = nullptr;
};

// `count` elements. `shift` elements of a block of its own go in front, so that the array's start has any alignment
// that its type allows. An empty array is a null pointer, as torch's are.
template <class T>
class Array {
 public:
  explicit Array(int64_t count, int64_t shift = 0)
      : block_(sizeof(T) * static_cast<size_t>(count > 0 ? count + shift : 0)),
        data_(count > 0 ? static_cast<T*>(block_.data()) + shift : nullptr),
        size_(count) {}
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  Block block_;
  T* data_;
  int64_t size_;
};

}  // namespace edgeweave::tests
