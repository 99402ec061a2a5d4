// Arithmetic on shapes that cannot overflow: how many bytes a strided tensor spans.
#pragma once

#include <cstdint>

namespace shoal::wire {

// Bytes from the first to the last element of a tensor, or -1 where that is no number of bytes:
// a negative size or stride, or an overflow. Zero elements span zero bytes.
inline int64_t spanBytes(const int64_t* sizes, const int64_t* strides, size_t dims,
                         int64_t item_bytes) {
  int64_t last = 0;
  int64_t elements = 1;
  bool empty = false;
  for (size_t i = 0; i < dims; ++i) {
    if (sizes[i] < 0 || strides[i] < 0) return -1;
    if (sizes[i] == 0) empty = true;
  }
  if (empty) return 0;
  for (size_t i = 0; i < dims; ++i) {
    int64_t step;
    if (__builtin_mul_overflow(elements, sizes[i], &elements)) return -1;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step)) return -1;
    if (__builtin_add_overflow(last, step, &last)) return -1;
  }
  int64_t bytes;
  if (__builtin_add_overflow(last, int64_t{1}, &last)) return -1;
  if (__builtin_mul_overflow(last, item_bytes, &bytes)) return -1;
  return bytes;
}

}  // namespace shoal::wire
