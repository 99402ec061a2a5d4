#pragma once

namespace shoal::client {

void registerComposites();

// Whether recurrent layers run whole at the worker (fast, no second derivative) or in steps.
void setWholeRnn(bool whole);
bool wholeRnn();

}  // namespace shoal::client
