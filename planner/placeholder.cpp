namespace zeroplan {}
