// NEEDLE_ASAN: 1 in a build with AddressSanitizer, by g++ or clang.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define NEEDLE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NEEDLE_ASAN 1
#endif
#endif
#ifndef NEEDLE_ASAN
#define NEEDLE_ASAN 0
#endif
