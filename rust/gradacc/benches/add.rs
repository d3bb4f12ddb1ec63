//! Bytes per second of `add`, from the first-level cache to memory: the gradient read, the sum read and written.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gradacc::{DType, Element, GradientAccumulator, ParamId, TensorView, Weight, bf16, f16};

fn add<T: Element>(criterion: &mut Criterion, value: T, sums: DType) {
    let mut group = criterion.benchmark_group(format!("add {} to {sums}", T::DTYPE));
    for len in [1 << 11, 1 << 16, 1 << 20, 1 << 25] {
        let builder = GradientAccumulator::builder().param(ParamId(0), &[len], T::DTYPE).dtype(sums);
        let (mut accumulator, gradient) = (builder.build().unwrap(), vec![value; len]);
        let micro_batch = [(ParamId(0), TensorView::from_slice(&gradient, &[len]).unwrap())];
        accumulator.add(&micro_batch[..], Weight::ONE).unwrap();
        let len_bytes = len * (T::DTYPE.len_bytes() + 2 * sums.len_bytes());
        group.throughput(Throughput::Bytes(len_bytes as u64));
        group.bench_with_input(BenchmarkId::from_parameter(len), &len, |bencher, _| {
            bencher.iter(|| accumulator.add(&micro_batch[..], Weight::ONE).unwrap());
        });
    }
}

fn all(criterion: &mut Criterion) {
    println!("SIMD level {}", gradacc::simd_level().unwrap().name());
    add(criterion, 1.0_f32, DType::F32);
    add(criterion, bf16::ONE, DType::F32);
    add(criterion, f16::ONE, DType::F32);
    add(criterion, 1.0_f64, DType::F64);
}

criterion_group!(benches, all);
criterion_main!(benches);
