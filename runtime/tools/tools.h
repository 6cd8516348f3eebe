/* Tools for developers: the observer, ranges for profilers, user kernels. */
#ifndef NIB_TOOLS_H
#define NIB_TOOLS_H

#include "../tensor/tensor.h"

#endif
