// Objects behind integer handles. No handle is used twice, by any registry, so that a stale one or another kind's is an
// error.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace edgeweave::onednn {

// Of all registries: calls under it are short.
inline std::mutex& registry_mutex() {
  static std::mutex* mutex = [] {
    auto* made = new std::mutex;
    // A child must not inherit a lock that another thread of its parent held.
    (void)pthread_atfork([] { registry_mutex().lock(); }, [] { registry_mutex().unlock(); },
                         [] { registry_mutex().unlock(); });
    return made;
  }();
  return *mutex;
}

inline int64_t next_handle() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

template <class T>
class Registry {
 public:
  explicit Registry(const char* what) : what_(what) {}

  int64_t add(std::shared_ptr<T> object) {
    const int64_t handle = next_handle();
    const std::lock_guard<std::mutex> guard(registry_mutex());
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<T> find(int64_t handle) {
    {
      const std::lock_guard<std::mutex> guard(registry_mutex());
      const auto found = objects_.find(handle);
      if (found != objects_.end()) return found->second;
    }
    throw std::invalid_argument(std::string(what_) + " has handle " + std::to_string(handle));
  }
  void release(int64_t handle) {
    std::shared_ptr<T> dropped;  // destroyed after the lock is gone
    const std::lock_guard<std::mutex> guard(registry_mutex());
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return;
    dropped = std::move(found->second);
    objects_.erase(found);
  }

 private:
  const char* what_;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
};

}  // namespace edgeweave::onednn
