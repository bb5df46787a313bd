// operator new of the program it is linked to, or loaded before, which refuses what it is told to.
#pragma once

#include <cstdint>

extern "C" {
// Refuses the number-th request from now on, and with `for_good` all after it; 0: none.
void refuse(int64_t number, bool for_good);
int64_t requests_since();  // the last call of refuse
}
