// Finds oneDNN's functions in a shared library that is named at run time.
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include "api.h"
#include "memory.h"

// glibc 2.34 moved these functions from libdl into libc under a new version. The old version is there too, and is the
// one that glibc 2.28 has, so that the library keeps within manylinux_2_28.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.17");
__asm__(".symver dlsym,dlsym@GLIBC_2.17");
__asm__(".symver dlclose,dlclose@GLIBC_2.17");
__asm__(".symver dlerror,dlerror@GLIBC_2.17");
#endif

namespace edgeweave::onednn {
namespace {

struct Loaded {
  std::mutex mutex;
  std::string path;
  std::string version;
  Api table;
  bool ready = false;
};

// Never destroyed: compiled code of the library may still run while the process ends.
Loaded& loaded() {
  static auto* state = new Loaded;
  return *state;
}

std::string last_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

const char* name_of(dnnl_status_t status) {
  switch (status) {
    case dnnl_out_of_memory:
      return "out of memory";
    case dnnl_invalid_arguments:
      return "invalid arguments";
    case dnnl_unimplemented:
      return "unimplemented";
    case dnnl_runtime_error:
      return "runtime error";
    case dnnl_invalid_graph:
      return "invalid graph";
    case dnnl_invalid_graph_op:
      return "invalid operation";
    case dnnl_invalid_shape:
      return "invalid shape";
    case dnnl_invalid_data_type:
      return "invalid data type";
    default:
      return "failed";
  }
}

}  // namespace

std::string load(const std::string& path) {
  Loaded& state = loaded();
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.ready) {
    if (path != state.path)
      throw std::invalid_argument("oneDNN: one library can be loaded in a process, got " + path + " after " +
                                  state.path);
    return state.version;
  }
  // Local: torch has an oneDNN of its own inside, and neither may find the other's symbols.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("oneDNN: " + path + " does not load: " + last_error());
  Api table;
#define EW_DNNL_FIND(name)                                                                                     \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(library, #name));                                  \
  if (table.name == nullptr) {                                                                                 \
    dlclose(library);                                                                                          \
    throw std::runtime_error("oneDNN: " + path +                                                               \
                             " has no function " #name "; version 3.2 or later with the Graph API is needed"); \
  }
  EW_DNNL_FUNCTIONS(EW_DNNL_FIND)
#undef EW_DNNL_FIND
  const dnnl_version_t* version = table.dnnl_version();
  const std::string text =
      std::to_string(version->major) + "." + std::to_string(version->minor) + "." + std::to_string(version->patch);
  std::string fault;
  if (version->major != 3 || version->minor < 2) fault = "must be version 3.2 or a later 3.x, is " + text;
  // Any other runtime would bring threads of its own beside torch's.
  if (version->cpu_runtime != DNNL_RUNTIME_OMP) fault = "must be built for OpenMP, is built for another runtime";
  if (!fault.empty()) {
    dlclose(library);
    throw std::runtime_error("oneDNN: " + path + " " + fault);
  }
  // Weights are laid out for the kernels once, at the first execution, and kept.
  expect(table.dnnl_graph_set_constant_tensor_cache(1), "set_constant_tensor_cache");
  // Its own cache of compiled partitions would outlive ours, with the packed weights inside.
  expect(table.dnnl_graph_set_compiled_partition_cache_capacity(0), "set_compiled_partition_cache_capacity");
  state.table = table;
  state.path = path;
  state.version = text;
  state.ready = true;
  return text;
}

const Api& api() {
  Loaded& state = loaded();
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.ready) throw std::runtime_error("oneDNN: no library is loaded");
  return state.table;
}

dnnl_engine_t engine() {
  static const dnnl_engine_t shared = [] {
    const Api& table = api();
    dnnl_graph_allocator_t allocator = nullptr;
    expect(table.dnnl_graph_allocator_create(&allocator, allocate, deallocate), "allocator_create");
    dnnl_engine_t made = nullptr;
    const dnnl_status_t status = table.dnnl_graph_make_engine_with_allocator(&made, dnnl_cpu, 0, allocator);
    table.dnnl_graph_allocator_destroy(allocator);
    expect(status, "make_engine_with_allocator");
    return made;
  }();
  return shared;
}

void expect(dnnl_status_t status, const char* what) {
  if (status == dnnl_success) return;
  throw std::runtime_error(std::string("oneDNN: ") + what + ": " + name_of(status) + " (status " +
                           std::to_string(static_cast<int>(status)) + ")");
}

}  // namespace edgeweave::onednn
