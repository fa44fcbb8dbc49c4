// Keeps the library within manylinux_2_28 (glibc 2.28, the libstdc++ of gcc 8) when a newer toolchain builds it. The
// headers of a newer toolchain refer to a few symbols that those libraries do not have. Each is defined here, and
// exports.map keeps them inside, so that nothing newer is asked of the machine that runs the library.
// scripts/check_wheel.py finds what may join them one day.
#include <new>
#include <sstream>

#if defined(__GLIBC__)

// Read by shared_ptr since glibc 2.32; zero means that it counts atomically, always.
extern "C" {
char __libc_single_threaded = 0;
}

// The default constructors of string streams became symbols of libstdc++ in GLIBCXX_3.4.26.
template std::basic_stringstream<char>::basic_stringstream();
template std::basic_ostringstream<char>::basic_ostringstream();

// Called by std::vector since GLIBCXX_3.4.29.
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

#endif
