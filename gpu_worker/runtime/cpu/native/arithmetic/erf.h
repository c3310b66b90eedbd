/* The activation gelu from a table, where one instruction looks up 16 lanes in it. */
#pragma once
#include "vectors.h"

#ifdef __AVX512F__
/* erf(t / sqrt(2)) / 2 for t >= 0, in pieces: near t = k / PIECES_PER_UNIT it is the polynomial of
 * r = PIECES_PER_UNIT t - k with coefficients [0][k] .. [4][k], which are those of Chebyshev's interpolation. The last piece
 * is all t beyond: there r is 0, and the value 1 / 2. What is left of the error are the floats' own roundings. */
#define PIECES_PER_UNIT 5.5f
static const float half_erf[5][32] __attribute__((aligned(64))) = {
    {0.0f, 0.07213729f, 0.14193521f, 0.20727953f, 0.26647055f, 0.31834894f, 0.36234355f, 0.3984426f, 0.42710242f,
     0.44911826f, 0.46548182f, 0.47724986f, 0.48543853f, 0.49095172f, 0.49454322f, 0.49680698f, 0.4981876f, 0.49900228f,
     0.49946743f, 0.4997244f, 0.49986175f, 0.49993277f, 0.49996832f, 0.49998555f, 0.4999936f, 0.49999726f, 0.49999887f,
     0.49999955f, 0.49999982f, 0.49999994f, 0.49999997f, 0.5f},
    {0.07253492f, 0.07134585f, 0.06789433f, 0.062508844f, 0.055679154f, 0.04798295f, 0.040005933f, 0.032270454f,
     0.025184238f, 0.019014973f, 0.013890111f, 0.009816548f, 0.0067120465f, 0.0044401144f, 0.0028416878f, 0.0017595497f,
     0.0010540707f, 0.000610915f, 0.00034255852f, 0.00018583676f, 9.753743e-5f, 4.9528335e-5f, 2.4332061e-5f, 1.1565031e-5f,
     5.3181097e-6f, 2.3659766e-6f, 1.0183712e-6f, 4.2407655e-7f, 1.708539e-7f, 6.659596e-8f, 2.5113843e-8f, 9.162643e-9f},
    {-1.1300801e-16f, -0.001179269f, -0.0022444383f, -0.003099609f, -0.0036812625f, -0.003965529f, -0.003967527f,
     -0.0037337681f, -0.0033301448f, -0.002828672f, -0.0022958855f, -0.0017848271f, -0.0013313157f, -0.00095407525f,
     -0.0006575819f, -0.00043625326f, -0.0002787636f, -0.000171663f, -0.000101918966f, -5.8362486e-5f, -3.2244145e-5f,
     -1.7191896e-5f, -8.848175e-6f, -4.3967143e-6f, -2.1097158e-6f, -9.77705e-7f, -4.3766227e-7f, -1.8926497e-7f,
     -7.907659e-8f, -3.192376e-8f, -1.24539214e-8f, -4.6952415e-9f},
    {-0.000399023f, -0.00037952707f, -0.00032417994f, -0.00024170314f, -0.00014449554f, -4.6056033e-5f, 4.1587977e-5f,
     0.00010983003f, 0.00015443677f, 0.00017544487f, 0.00017622705f, 0.0001621171f, 0.00013900506f, 0.000112216934f,
     8.58376e-5f, 6.2481915e-5f, 4.3412296e-5f, 2.8855562e-5f, 1.8380097e-5f, 1.1234333e-5f, 6.5961467e-6f, 3.723502e-6f,
     2.0222737e-6f, 1.057336e-6f, 5.3246146e-7f, 2.583752e-7f, 1.2085381e-7f, 5.450734e-8f, 2.3711301e-8f, 9.951021e-9f,
     4.0298187e-9f, 1.5750413e-9f},
    {3.7352745e-16f, 9.618975e-6f, 1.7696562e-5f, 2.3033448e-5f, 2.5017907e-5f, 2.3711156e-5f, 1.9761705e-5f, 1.4190123e-5f,
     8.118853e-6f, 2.5264355e-6f, -1.9154024e-6f, -4.8986035e-6f, -6.4410087e-6f, -6.7883484e-6f, -6.297036e-6f,
     -5.3315835e-6f, -4.1957574e-6f, -3.1013558e-6f, -2.1675594e-6f, -1.4389079e-6f, -9.102094e-7f, -5.499701e-7f,
     -3.1799908e-7f, -1.7620994e-7f, -9.368224e-8f, -4.783203e-8f, -2.347237e-8f, -1.1077942e-8f, -5.031175e-9f,
     -2.19987e-9f, -9.2645214e-10f, -3.7593154e-10f},
};

INLINE vp coefficient(int power, __m512i piece) {
  const float *of = half_erf[power];
  return (vp)_mm512_permutex2var_ps(_mm512_load_ps(of), piece, _mm512_load_ps(of + LANES));
}

/* x (1 + erf(x / sqrt(2))) / 2 */
INLINE vp gelu_of_table(vp x) {
  const vp size = (vp)_mm512_abs_ps((__m512)x);
  const vp t = (vp)_mm512_min_ps((__m512)(size * PIECES_PER_UNIT), _mm512_set1_ps(31.0f));
  const vp moved = t + 12582912.0f; /* its low bits hold the nearest integer */
  const vp r = t - (moved - 12582912.0f);
  const __m512i piece = (__m512i)moved;
  vp p = coefficient(4, piece);
  p = add_times_part(coefficient(3, piece), p, r);
  p = add_times_part(coefficient(2, piece), p, r);
  p = add_times_part(coefficient(1, piece), p, r);
  p = add_times_part(coefficient(0, piece), p, r);
  return add_times_part(0.5f * x, size, p);
}
#endif
