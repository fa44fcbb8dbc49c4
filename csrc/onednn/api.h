// The functions of oneDNN that the bridge calls, found in a libdnnl that is loaded at run time. Compiled against the
// headers of 3.2: the C API is append-only through 3.13, so their enums and structures hold for every later 3.x.
#pragma once

#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl_graph.h>

#include <string>

namespace edgeweave::onednn {

// Every function of the table. All of them exist in 3.2.
#define EW_DNNL_FUNCTIONS(X)                            \
  X(dnnl_version)                                       \
  X(dnnl_engine_destroy)                                \
  X(dnnl_stream_create)                                 \
  X(dnnl_stream_destroy)                                \
  X(dnnl_graph_allocator_create)                        \
  X(dnnl_graph_allocator_destroy)                       \
  X(dnnl_graph_make_engine_with_allocator)              \
  X(dnnl_graph_logical_tensor_get_mem_size)             \
  X(dnnl_graph_tensor_create)                           \
  X(dnnl_graph_tensor_destroy)                          \
  X(dnnl_graph_tensor_set_data_handle)                  \
  X(dnnl_graph_op_create)                               \
  X(dnnl_graph_op_destroy)                              \
  X(dnnl_graph_op_add_input)                            \
  X(dnnl_graph_op_add_output)                           \
  X(dnnl_graph_op_set_attr_f32)                         \
  X(dnnl_graph_op_set_attr_bool)                        \
  X(dnnl_graph_op_set_attr_s64)                         \
  X(dnnl_graph_op_set_attr_str)                         \
  X(dnnl_graph_partition_destroy)                       \
  X(dnnl_graph_partition_get_op_num)                    \
  X(dnnl_graph_partition_get_ops)                       \
  X(dnnl_graph_partition_compile)                       \
  X(dnnl_graph_partition_get_input_ports_num)           \
  X(dnnl_graph_partition_get_input_ports)               \
  X(dnnl_graph_partition_get_output_ports_num)          \
  X(dnnl_graph_partition_get_output_ports)              \
  X(dnnl_graph_partition_is_supported)                  \
  X(dnnl_graph_compiled_partition_create)               \
  X(dnnl_graph_compiled_partition_execute)              \
  X(dnnl_graph_compiled_partition_destroy)              \
  X(dnnl_graph_compiled_partition_query_logical_tensor) \
  X(dnnl_graph_graph_create_with_fpmath_mode)           \
  X(dnnl_graph_graph_destroy)                           \
  X(dnnl_graph_add_op)                                  \
  X(dnnl_graph_graph_finalize)                          \
  X(dnnl_graph_graph_filter)                            \
  X(dnnl_graph_graph_get_partition_num)                 \
  X(dnnl_graph_graph_get_partitions)                    \
  X(dnnl_graph_set_compiled_partition_cache_capacity)   \
  X(dnnl_graph_set_constant_tensor_cache)

struct Api {
#define EW_DNNL_FIELD(name) decltype(&::name) name = nullptr;
  EW_DNNL_FUNCTIONS(EW_DNNL_FIELD)
#undef EW_DNNL_FIELD
};

// Loads the library at `path`, once in a process; the same path again does nothing, another one throws.
// Returns its version, such as "3.2.0".
std::string load(const std::string& path);

// The table; throws where `load` has not succeeded yet.
const Api& api();

// The CPU engine that everything runs on, made at first use and never destroyed.
dnnl_engine_t engine();

// Throws with the name of what was tried and oneDNN's status in words.
void expect(dnnl_status_t status, const char* what);

}  // namespace edgeweave::onednn
