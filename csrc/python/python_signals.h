// Lets waits in C++ hear Ctrl-C. Knows Python.
#pragma once

#include <cstdint>

namespace shoal {

// Counts SIGINTs from now on, before Python's own handler gets them.
void watchInterrupts();
uint64_t interruptsSeen();

// Called by a thread that waits and holds no lock. In the main thread it runs Python's signal
// handlers and raises what they raise. In a thread of autograd, for which the main thread waits, it
// raises KeyboardInterrupt if an interrupt has come since `seen`. Other threads of a program are
// not interrupted, as in Python.
void checkSignals(uint64_t& seen);

}  // namespace shoal
