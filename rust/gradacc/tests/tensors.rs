//! Every kind of tensor an accumulator takes: any strides, complex numbers, rows of a table, no elements at all.

use gradacc::{
    DType, Element, Error, GradientAccumulator, OnNonFinite, ParamId, Reduction, TensorError, TensorView, Weight, bf16,
};
use proptest::prelude::*;

const W: ParamId = ParamId(0);

fn accumulator<T: Element>(shape: &[usize]) -> GradientAccumulator {
    GradientAccumulator::builder().param(W, shape, T::DTYPE).micro_norms(true).build().unwrap()
}

/// Sums of one write and one add of a gradient, and the norm of the last.
fn summed<S: Element>(accumulator: &mut GradientAccumulator, view: &TensorView<'_>) -> (Vec<S>, f64) {
    for weight in [1.0, 2.5] {
        accumulator.add(&[(W, view.clone())][..], Weight::new(weight).unwrap()).unwrap();
    }
    let norm = accumulator.last().unwrap().norm.unwrap();
    let gradients = accumulator.take().unwrap();
    (gradients.get(W).unwrap().unwrap().as_slice::<S>().unwrap().to_vec(), norm)
}

/// One dimension as it lies in memory: its size, its step, and whether it is walked backwards.
type Dimension = (usize, usize, bool);

/// A view of `data`: dimensions given from the outermost in memory, `order` saying which comes when logically. And the
/// same elements in logical order.
fn strided<T: Element>(
    data: &[T],
    dimensions: &[Dimension],
    order: &[usize],
) -> (Vec<usize>, Vec<isize>, usize, Vec<T>) {
    let mut stride = 1;
    let mut strides = vec![0; dimensions.len()];
    let mut origin = 0;
    for (axis, &(size, step, backwards)) in dimensions.iter().enumerate().rev() {
        strides[axis] = stride * step as isize * if backwards { -1 } else { 1 };
        if backwards {
            origin += (size - 1) * step * stride as usize;
        }
        stride *= (size * step.max(1)) as isize;
    }
    let (shape, strides): (Vec<usize>, Vec<isize>) =
        order.iter().map(|&axis| (dimensions[axis].0, strides[axis])).unzip();
    let count = shape.iter().product::<usize>();
    let element = |mut i: usize| {
        let mut offset = origin as isize;
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            offset += (i % size) as isize * stride;
            i /= size;
        }
        data[offset as usize]
    };
    let logical = (0..count).map(element).collect();
    (shape, strides, origin, logical)
}

fn check_strided<T: Element, S: Element + PartialEq>(data: &[T], dimensions: &[Dimension], order: &[usize]) {
    let (shape, strides, origin, logical) = strided(data, dimensions, order);
    // SAFETY: every element lies within `data`, which has room for the product of sizes and steps.
    let view = unsafe {
        let start = data.as_ptr().wrapping_add(origin).cast();
        TensorView::from_raw_parts(start, T::DTYPE, &shape, Some(&strides)).unwrap()
    };
    let straight = TensorView::from_slice(&logical, &shape).unwrap();
    let (expected, norm) = summed::<S>(&mut accumulator::<T>(&shape), &straight);
    let (got, got_norm) = summed::<S>(&mut accumulator::<T>(&shape), &view);
    assert!(got == expected, "{dimensions:?} {order:?}");
    assert!((got_norm - norm).abs() <= 1e-12 * norm, "{dimensions:?} {order:?}: {got_norm} {norm}");
}

fn numbers<T>(count: usize, of: impl Fn(f32) -> T) -> Vec<T> {
    (0..count).map(|i| of((i * 7919 % 1013) as f32 - 500.25)).collect()
}

proptest! {
    #[test]
    fn logical_order_decides_whatever_the_order_in_memory(
        dimensions in prop::collection::vec((1..12_usize, 0..3_usize, any::<bool>()), 0..5),
        order in Just(()).prop_perturb(|(), mut random| random.random::<u64>()),
    ) {
        let mut axes: Vec<usize> = (0..dimensions.len()).collect();
        for i in (1..axes.len()).rev() {
            axes.swap(i, (order >> (8 * i)) as usize % (i + 1));
        }
        let room = dimensions.iter().map(|&(size, step, _)| size * step.max(1)).product();
        check_strided::<f32, f32>(&numbers(room, |x| x), &dimensions, &axes);
        check_strided::<bf16, f32>(&numbers(room, bf16::from_f32), &dimensions, &axes);
        check_strided::<[f64; 2], [f64; 2]>(&numbers(room, |x| [x.into(), (2.0 * x).into()]), &dimensions, &axes);
    }
}

#[test]
fn large_tensors_that_lie_the_other_way_round() {
    // A transposed matrix whose rows are wider than a tile; one of narrow rows; channels last; with a gap; backwards.
    let cases: &[(&[Dimension], &[usize])] = &[
        (&[(700, 1, false), (333, 1, false)], &[1, 0]),
        (&[(9, 1, false), (20_000, 1, false)], &[1, 0]),
        (&[(40, 1, false), (3, 1, false), (3, 1, false), (70, 1, false)], &[0, 3, 1, 2]),
        (&[(700, 1, false), (333, 2, true)], &[1, 0]),
        (&[(3, 1, false), (3, 1, false), (64, 1, false), (100, 1, false)], &[3, 2, 0, 1]),
        (&[(100_000, 1, true)], &[0]),
    ];
    for (dimensions, order) in cases {
        let room = dimensions.iter().map(|&(size, step, _)| size * step).product();
        check_strided::<f32, f32>(&numbers(room, |x| x), dimensions, order);
        check_strided::<bf16, f32>(&numbers(room, bf16::from_f32), dimensions, order);
        check_strided::<[f32; 2], [f32; 2]>(&numbers(room, |x| [x, -x]), dimensions, order);
    }
}

#[test]
fn complex_numbers_are_pairs() {
    for (reduction, expected) in [(Reduction::Mean, [1.0_f32, 2.0]), (Reduction::Sum, [2.0, 4.0])] {
        let builder = GradientAccumulator::builder().param(W, &[3], DType::Complex64).reduction(reduction);
        let mut accumulator = builder.build().unwrap();
        for _ in 0..2 {
            let gradient = [[1.0_f32, 2.0]; 3];
            accumulator.add(&[(W, TensorView::from_slice(&gradient, &[3]).unwrap())][..], Weight::ONE).unwrap();
        }
        let gradients = accumulator.take().unwrap();
        assert_eq!(gradients.get(W).unwrap().unwrap().as_slice::<[f32; 2]>().unwrap(), [expected; 3]);
        assert_eq!(gradients.flat().unwrap()[0].as_slice::<f32>().unwrap()[..2], expected);
    }
}

#[test]
fn real_and_complex_do_not_mix() {
    let one = [1.0_f64; 2];
    let pair = [[1.0_f32; 2]; 2];
    let real = TensorView::from_slice(&one, &[2]).unwrap();
    let complex = TensorView::from_slice(&pair, &[2]).unwrap();
    for (of, wrong) in [(DType::F32, complex), (DType::Complex128, real)] {
        let mut accumulator = GradientAccumulator::builder().param(W, &[2], of).build().unwrap();
        let refused = accumulator.add(&[(W, wrong)][..], Weight::ONE);
        assert!(matches!(refused, Err(Error::Tensor { reason: TensorError::Dtype { .. }, .. })), "{refused:?}");
    }
    for sums in [DType::F16, DType::BF16] {
        assert!(GradientAccumulator::builder().param(W, &[2], DType::Complex64).dtype(sums).build().is_err());
    }
}

/// Rows of a table as a dense tensor, summed in f64.
fn dense(numbers: &[usize], values: &[f32], rows: usize) -> Vec<f64> {
    let len = values.len() / numbers.len().max(1);
    let mut dense = vec![0.0; rows * len];
    for (place, number) in numbers.iter().enumerate() {
        for i in 0..len {
            dense[number * len + i] += f64::from(values[place * len + i]);
        }
    }
    dense
}

proptest! {
    #[test]
    fn rows_are_added_where_they_belong(
        numbers in prop::collection::vec(0..37_usize, 0..60),
        len in prop::sample::select(vec![1, 3, 64, 700]),
    ) {
        let values = numbers_as_values(numbers.len() * len);
        let view = TensorView::from_slice(&values, &[numbers.len(), len]).unwrap();
        let view = TensorView::from_rows(numbers.clone(), view, &[37, len]).unwrap();
        let expected = dense(&numbers, &values, 37);
        let expected = if numbers.is_empty() { vec![0.0; 37 * len] } else { expected };
        let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        for policy in [OnNonFinite::Propagate, OnNonFinite::Raise] {
            let builder = GradientAccumulator::builder().param(W, &[37, len], DType::F32).on_nonfinite(policy);
            let mut accumulator = builder.micro_norms(true).build().unwrap();
            // The second window writes where the first has left its sums.
            for _ in 0..2 {
                for _ in 0..3 {
                    accumulator.add(&[(W, view.clone())][..], Weight::ONE).unwrap();
                    prop_assert!((accumulator.last().unwrap().norm.unwrap() - norm).abs() <= 1e-12 * norm);
                }
                let gradients = accumulator.take().unwrap();
                let got = gradients.get(W).unwrap().unwrap();
                for (got, expected) in got.as_slice::<f32>().unwrap().iter().zip(&expected) {
                    prop_assert!((f64::from(*got) - expected).abs() <= 1e-4, "{got} {expected}");
                }
            }
        }
    }
}

/// Multiples of a quarter, so that sums are exact.
fn numbers_as_values(count: usize) -> Vec<f32> {
    numbers(count, |x| x)
}

#[test]
fn rows_come_on_top_of_dense_gradients_and_the_other_way_round() {
    let (ones, values) = ([1.0_f32; 8], [2.0_f32, 3.0, 5.0, 7.0]);
    let rows = TensorView::from_rows(vec![3, 3], TensorView::from_slice(&values, &[2, 2]).unwrap(), &[4, 2]).unwrap();
    let dense = TensorView::from_slice(&ones, &[4, 2]).unwrap();
    for order in [[&rows, &dense], [&dense, &rows]] {
        let builder = GradientAccumulator::builder().param(W, &[4, 2], DType::F32).reduction(Reduction::Sum);
        let mut accumulator = builder.build().unwrap();
        for view in order {
            accumulator.add(&[(W, view.clone())][..], Weight::ONE).unwrap();
        }
        let gradients = accumulator.take().unwrap();
        let expected = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8.0, 11.0];
        assert_eq!(gradients.get(W).unwrap().unwrap().as_slice::<f32>().unwrap(), expected);
    }
}

#[test]
fn rows_of_bf16_are_summed_in_f32_however_often_they_come() {
    let values = vec![bf16::ONE; 1024];
    let view = TensorView::from_slice(&values, &[1024, 1]).unwrap();
    let view = TensorView::from_rows(vec![1; 1024], view, &[2, 1]).unwrap();
    let mut accumulator = accumulator::<bf16>(&[2, 1]);
    accumulator.add(&[(W, view)][..], Weight::ONE).unwrap();
    assert_eq!(accumulator.last().unwrap().norm, Some(1024.0));
    let gradients = accumulator.take().unwrap();
    assert_eq!(gradients.get(W).unwrap().unwrap().as_slice::<f32>().unwrap(), [0.0, 1024.0]);
}

#[test]
fn a_stale_view_of_the_running_sums_is_refused() {
    let mut accumulator = accumulator::<f32>(&[4]);
    let gradient = [1.0_f32; 4];
    let mut add = |view: TensorView<'_>| accumulator.add(&[(W, view)][..], Weight::ONE).map(|_| ());
    add(TensorView::from_slice(&gradient, &[4]).unwrap()).unwrap();
    let address = {
        let gradients = accumulator.take().unwrap();
        gradients.get(W).unwrap().unwrap().as_ptr()
    };
    let mut add = |view: TensorView<'_>| accumulator.add(&[(W, view)][..], Weight::ONE).map(|_| ());
    add(TensorView::from_slice(&gradient, &[4]).unwrap()).unwrap();
    for (offset, strides) in [(0, [1]), (2, [1]), (3, [-1]), (6, [-1])] {
        // SAFETY: refused before anything is read.
        let view = unsafe {
            let start = address.wrapping_add(offset * 4).cast();
            TensorView::from_raw_parts(start, DType::F32, &[4], Some(&strides)).unwrap()
        };
        let refused = add(view);
        assert!(matches!(refused, Err(Error::Tensor { reason: TensorError::Overlap, .. })), "{offset}: {refused:?}");
    }
}
