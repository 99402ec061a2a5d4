// Finds the user's own Python line that runs now, without taking the GIL: it only reads the frames
// of the calling thread, which cannot move while that thread is in here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

// Code below these directories is torch's or ours: not what a user wants to see.
void setInternalDirectories(std::vector<std::string> directories);

uint64_t currentPythonLine();  // a token; 0 where there is no Python frame
std::string describePythonLine(uint64_t token);

}  // namespace shoal
