// Shape inference on this thread.
#pragma once

namespace shoal::client {

// While one is alive on a thread, kernels of the device allocate nothing and send nothing.
class ShapeInference {
 public:
  ShapeInference() { ++depth_; }
  ~ShapeInference() { --depth_; }
  static bool active() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace shoal::client
