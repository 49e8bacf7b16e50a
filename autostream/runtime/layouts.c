/* Checks whether tensors have moved or changed their layout. Built and explained by layouts.py.

   It calls libtorch's stable C interface through function pointers that the caller passes: no header to find, nothing
   to link, and no version of PyTorch to match. */

#include <stdint.h>
#include <string.h>

typedef int32_t (*Getter)(void *tensor, void *value); /* 0, or an error: a sparse tensor has no address */

typedef struct {
    Getter address, dtype, dim, sizes, strides;
} Getters;

/* expected: the address of each tensor and, if all is nonzero, its dtype, dim, sizes and strides. */
int32_t unchanged(const Getters *get, void *const *tensors, int64_t count, const int64_t *expected, int32_t all)
{
    for (int64_t at = 0; at < count; at++) {
        void *tensor = tensors[at], *address;
        int32_t dtype;
        int64_t dim, *sizes, *strides;
        if (get->address(tensor, &address) || (int64_t)address != *expected++)
            return 0;
        if (!all)
            continue;
        if (get->dtype(tensor, &dtype) || dtype != *expected++)
            return 0;
        if (get->dim(tensor, &dim) || dim != *expected++)
            return 0;
        if (get->sizes(tensor, &sizes) || memcmp(sizes, expected, dim * sizeof *sizes))
            return 0;
        expected += dim;
        if (get->strides(tensor, &strides) || memcmp(strides, expected, dim * sizeof *strides))
            return 0;
        expected += dim;
    }
    return 1;
}
