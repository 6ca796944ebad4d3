// The version: setup.py and CMakeLists.txt read it from here.
#pragma once

#define KVARN_VERSION "0.1.0"
