// One translation unit per reduction and ISA fills its part of that ISA's kernel table.
#pragma once

#include "args.h"

namespace edgeweave::EW_ISA {
void fill_sum(KernelTable& table);
void fill_minmax(KernelTable& table);
void fill_minmax_grad(KernelTable& table);
void fill_arg(KernelTable& table);
void fill_dot(KernelTable& table);
void fill_gather(KernelTable& table);
}  // namespace edgeweave::EW_ISA
