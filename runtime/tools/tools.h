/* What is for people who develop: an observer, ranges for profilers, kernels of their own. */
#ifndef NIB_TOOLS_H
#define NIB_TOOLS_H

#include "../tensor/tensor.h"

#endif
