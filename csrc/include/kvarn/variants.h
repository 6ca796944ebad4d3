// The variant table: which numbers a Format may be made of. One X(n) each.
// docs/design.md tells what else a new row needs.
#pragma once

#define KVARN_FOR_EACH_BITS(X) X(2) X(3) X(4) X(8)
#define KVARN_FOR_EACH_GROUP(X) X(64) X(128)
#define KVARN_FOR_EACH_HEAD_DIM(X) X(64) X(128) X(256) X(512)
