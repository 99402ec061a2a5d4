// Segments larger than any device. Such a segment is made of extents: ordinary segments that lie
// wherever there is room. A tensor on it is like any other until an operator needs its bytes; then
// the operator runs by parts, each where its rows are (wide_calls.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "client/space/sharded_segments.h"

namespace shoal::client {

// Tells the allocator which bytes of the next segment belong together, for as long as it lives.
class RowHint {
 public:
  RowHint(at::IntArrayRef sizes, c10::ScalarType dtype);
  RowHint(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype);
  ~RowHint() { bytes_ = before_; }
  static uint64_t bytes() { return bytes_; }  // 0: unknown

 private:
  uint64_t before_ = bytes_;
  static thread_local uint64_t bytes_;
};

// While one lives, new segments are whole, whatever their size: an operator needs them so.
class WholeSegments {
 public:
  WholeSegments() { ++depth_; }
  ~WholeSegments() { --depth_; }
  static bool wanted() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

// The extents behind a tensor; null if it is not on a wide segment.
const Extents* extentsOf(const at::Tensor& tensor);
// The bytes of the segment between a view's first and last element.
struct Span {
  uint64_t start, end;
};
Span spanOf(const at::Tensor& tensor);
// The same elements as a tensor on the one extent that has them all; undefined if there is none.
at::Tensor withinExtent(const at::Tensor& tensor, const Extents& extents);
// Whether the tensor's elements lie in several extents.
bool crossesExtents(const at::Tensor& tensor);
// Where along `dim` the tensor passes from one extent to the next, as indices between 0 and its
// size; an index that lies in two extents gets a cut before and after it.
void addCuts(const at::Tensor& tensor, int64_t dim, std::vector<int64_t>& cuts);
// The dimension along which the tensor's memory is laid out: that with the largest stride.
int64_t majorDim(const at::Tensor& tensor);

// One tensor of the blocks, in order along `dim`, without copying them where that can be.
at::Tensor joinBlocks(std::vector<at::Tensor> made, int64_t dim);

}  // namespace shoal::client
