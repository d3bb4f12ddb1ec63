//! Windows as a trainer in Rust sees them: values against a model in f64, refusals, and what is handed over.

use gradacc::{
    DType, Error, GradientAccumulator, Gradients, HasGradients, OnMissing, OnNonFinite, ParamId, Reduction,
    TensorError, TensorView, Weight, WindowError, bf16,
};
use proptest::prelude::*;

const A: ParamId = ParamId(10);
const B: ParamId = ParamId(3);

fn two_params() -> gradacc::Builder {
    GradientAccumulator::builder().param(A, &[2], DType::F32).param(B, &[3], DType::F64)
}

fn view<T: gradacc::Element>(values: &[T]) -> TensorView<'_> {
    TensorView::from_slice(values, &[values.len()]).unwrap()
}

fn weight(weight: f64) -> Weight {
    Weight::new(weight).unwrap()
}

fn add_a(accumulator: &mut GradientAccumulator, value: f32, by: Weight) -> gradacc::Result<gradacc::Added> {
    accumulator.add(&[(A, view(&[value, value]))][..], by)
}

fn taken_a(gradients: &Gradients) -> Vec<f32> {
    gradients.get(A).unwrap().unwrap().as_slice().unwrap().to_vec()
}

#[test]
fn the_mean_is_weighted() {
    let mut accumulator = two_params().every(2).build().unwrap();
    assert!(!add_a(&mut accumulator, 5.0, weight(2.0)).unwrap().is_complete());
    assert!(add_a(&mut accumulator, 0.25, weight(8.0)).unwrap().is_complete());
    let gradients = accumulator.take().unwrap();
    assert_eq!((gradients.count(), gradients.weight()), (2, 10.0));
    assert_eq!(taken_a(&gradients), [1.2; 2]);
    assert!(gradients.get(B).unwrap().is_none());
}

#[test]
fn a_short_window_is_divided_by_what_it_holds() {
    let mut accumulator = two_params().every(4).build().unwrap();
    for _ in 0..3 {
        add_a(&mut accumulator, 1.0, Weight::ONE).unwrap();
    }
    assert_eq!(taken_a(&accumulator.take().unwrap()), [1.0; 2]);
}

#[test]
fn bf16_gradients_are_summed_in_f32() {
    let builder = GradientAccumulator::builder().param(A, &[1], DType::BF16).reduction(Reduction::Sum);
    let mut accumulator = builder.build().unwrap();
    for value in [256.0, 1.0, 1.0] {
        let gradient = [bf16::from_f32(value)];
        accumulator.add(&[(A, view(&gradient))][..], Weight::ONE).unwrap();
    }
    assert_eq!(taken_a(&accumulator.take().unwrap()), [258.0]);
}

#[test]
fn the_first_add_of_a_window_writes() {
    let mut accumulator = two_params().build().unwrap();
    for value in [f32::NAN, -0.0] {
        add_a(&mut accumulator, value, Weight::ONE).unwrap();
        assert_eq!(accumulator.last().unwrap().finite, !value.is_nan());
        let bits: Vec<u32> = taken_a(&accumulator.take().unwrap()).iter().map(|x| x.to_bits()).collect();
        assert!(value.is_nan() || bits == [(-0.0_f32).to_bits(); 2]);
    }
}

#[test]
fn a_masked_micro_batch_is_counted_and_not_read() {
    let mut accumulator = two_params().on_nonfinite(OnNonFinite::Raise).build().unwrap();
    add_a(&mut accumulator, f32::NAN, weight(0.0)).unwrap();
    let gradients = accumulator.take().unwrap();
    assert_eq!((gradients.count(), gradients.weight(), gradients.norm().unwrap()), (1, 0.0, 0.0));
    assert_eq!(taken_a(&gradients), [0.0; 2]);
}

fn shape_error(name: &str, expected: &[usize], got: &[usize]) -> Error {
    TensorError::Shape { expected: expected.into(), got: got.into() }.of(name)
}

#[test]
fn a_refused_micro_batch_changes_nothing() {
    let mut accumulator = two_params().every(3).on_nonfinite(OnNonFinite::Raise).build().unwrap();
    add_a(&mut accumulator, 2.0, Weight::ONE).unwrap();
    let (good, bad) = ([9.0_f32; 2], [9.0_f64, f64::NAN, 9.0]);
    let refusals: [(&[(ParamId, TensorView<'_>)], Error); 5] = [
        (&[(A, view(&good)), (B, view(&bad[..2]))], shape_error("3", &[3], &[2])),
        (&[(A, view(&good)), (ParamId(4), view(&bad))], Error::UnknownParameter { parameter: "4".into() }),
        (&[(A, view(&good)), (B, view(&bad))], Error::NonFinite { parameter: "3".into(), is_added: false }),
        (&[(A, view(&good)), (A, view(&good))], Error::DuplicateParameter { parameter: "10".into() }),
        (&[(A, TensorView::from_slice(&good, &[1, 2]).unwrap())], shape_error("10", &[2], &[1, 2])),
    ];
    for (micro_batch, error) in refusals {
        assert_eq!(accumulator.add(micro_batch, Weight::ONE).unwrap_err(), error);
        assert_eq!((accumulator.count(), accumulator.weight()), (1, 1.0));
    }
    let too_large = Weight::ONE.with_scale(1e300).unwrap();
    assert!(matches!(add_a(&mut accumulator, 9.0, too_large), Err(Error::Argument { name: "scale", .. })));
    assert_eq!(taken_a(&accumulator.take().unwrap()), [2.0; 2]);
}

#[test]
fn a_window_that_can_not_be_taken_is_kept() {
    let mut accumulator = two_params().every(2).build().unwrap();
    assert_eq!(accumulator.take().err(), Some(WindowError::Empty { rejected: 0 }.into()));
    add_a(&mut accumulator, 6.0, weight(0.0).with_scale(1.0).unwrap()).unwrap();
    assert_eq!(accumulator.take().err(), Some(WindowError::NoWeight.into()));
    add_a(&mut accumulator, 0.0, weight(3.0)).unwrap();
    assert_eq!(add_a(&mut accumulator, 9.0, Weight::ONE).err(), Some(WindowError::Complete { count: 2 }.into()));
    assert_eq!(taken_a(&accumulator.take().unwrap()), [2.0; 2]);
}

#[test]
fn a_skipped_micro_batch_adds_no_weight_and_is_waited_for() {
    let mut accumulator = two_params().every(2).on_nonfinite(OnNonFinite::Skip).build().unwrap();
    add_a(&mut accumulator, 1.0, Weight::ONE).unwrap();
    let skipped = add_a(&mut accumulator, f32::INFINITY, weight(5.0)).unwrap();
    assert!(skipped.is_skipped() && !skipped.is_complete());
    assert!(add_a(&mut accumulator, 3.0, Weight::ONE).unwrap().is_complete());
    let gradients = accumulator.take().unwrap();
    assert_eq!((gradients.count(), gradients.weight(), gradients.rejected()), (2, 2.0, 1));
    assert_eq!(taken_a(&gradients), [2.0; 2]);
}

#[test]
fn a_missing_gradient_can_be_an_error() {
    let mut accumulator = two_params().on_missing(OnMissing::Error).build().unwrap();
    let expected = Error::MissingGradient { parameter: "3".into() };
    assert_eq!(add_a(&mut accumulator, 1.0, Weight::ONE).unwrap_err(), expected);
    let (a, b) = ([1.0_f32; 2], [1.0_f64; 3]);
    accumulator.add(&[(B, view(&b)), (A, view(&a))][..], Weight::ONE).unwrap();
    assert_eq!(accumulator.take().unwrap().ids().collect::<Vec<_>>(), [A, B]);
}

#[test]
fn a_parameter_registered_within_a_window_moves_nothing() {
    let late = ParamId(7);
    let mut accumulator = GradientAccumulator::builder().param(A, &[2], DType::F32).build().unwrap();
    add_a(&mut accumulator, 2.0, Weight::ONE).unwrap();
    accumulator.register(gradacc::ParamSpec::new(late, &[1], DType::F32)).unwrap();
    accumulator.add(&[(A, view(&[4.0_f32; 2])), (late, view(&[8.0_f32]))][..], Weight::ONE).unwrap();
    let gradients = accumulator.take().unwrap();
    assert_eq!(taken_a(&gradients), [3.0; 2]);
    assert_eq!(gradients.get(late).unwrap().unwrap().as_slice::<f32>().unwrap(), [4.0]);
    assert_eq!(gradients.flat().unwrap().len(), 2);
}

#[test]
fn gradients_are_added_like_any_micro_batch() {
    let (mut inner, mut outer) = (two_params().build().unwrap(), two_params().build().unwrap());
    for values in [&[1.0_f32, 1.0][..], &[3.0, 5.0, 7.0]] {
        for &value in values {
            add_a(&mut inner, value, Weight::ONE).unwrap();
        }
        let gradients = inner.take().unwrap();
        outer.add(&gradients, weight(gradients.weight())).unwrap();
    }
    assert_eq!(taken_a(&outer.take().unwrap()), [3.4; 2]);
}

#[test]
fn settings_out_of_range() {
    assert!(matches!(two_params().every(0).build(), Err(Error::Argument { name: "every", .. })));
    assert!(matches!(two_params().param(A, &[1], DType::F32).build(), Err(Error::DuplicateParameter { .. })));
    assert!(matches!(two_params().dtype(DType::BF16).build(), Err(Error::Tensor { .. })));
}

// ---- any window against a model in f64

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// Gradients of one dtype, over storage of their own.
enum Values {
    F16(Vec<gradacc::f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Values {
    fn new(dtype: DType, values: &[f64]) -> Self {
        match dtype {
            DType::F16 => Self::F16(values.iter().map(|&x| gradacc::f16::from_f64(x)).collect()),
            DType::BF16 => Self::BF16(values.iter().map(|&x| bf16::from_f64(x)).collect()),
            DType::F32 => Self::F32(values.iter().map(|&x| x as f32).collect()),
            _ => Self::F64(values.to_vec()),
        }
    }

    fn view(&self) -> TensorView<'_> {
        match self {
            Self::F16(values) => view(values),
            Self::BF16(values) => view(values),
            Self::F32(values) => view(values),
            Self::F64(values) => view(values),
        }
    }

    fn exact(&self) -> Vec<f64> {
        match self {
            Self::F16(values) => values.iter().map(|x| x.to_f64()).collect(),
            Self::BF16(values) => values.iter().map(|x| x.to_f64()).collect(),
            Self::F32(values) => values.iter().map(|&x| x.into()).collect(),
            Self::F64(values) => values.clone(),
        }
    }
}

#[derive(Clone, Debug)]
struct MicroBatch {
    weight: f64,
    scale: Option<f64>,
    present: Vec<bool>,
}

fn micro_batches(params: usize) -> impl Strategy<Value = Vec<MicroBatch>> {
    let scale = prop_oneof![Just(None), Just(Some(0.0)), (-4.0..4.0).prop_map(Some)];
    let micro_batch = (0.01..50.0, scale, proptest::collection::vec(any::<bool>(), params));
    proptest::collection::vec(
        micro_batch.prop_map(|(weight, scale, present)| MicroBatch { weight, scale, present }),
        1..7,
    )
}

fn windows() -> impl Strategy<Value = (Vec<(DType, usize)>, Vec<MicroBatch>, bool, u64)> {
    let params = proptest::collection::vec((proptest::sample::select(&DTYPES), 0_usize..70), 1..5);
    params.prop_flat_map(|params| {
        let count = params.len();
        (Just(params), micro_batches(count), any::<bool>(), any::<u64>())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_window_agrees_with_a_model_in_f64((params, batches, mean, seed) in windows()) {
        let mut builder = GradientAccumulator::builder();
        for (i, (dtype, len)) in params.iter().enumerate() {
            builder = builder.param(ParamId(i as u64), &[*len], *dtype);
        }
        let mut accumulator = builder.reduction(if mean { Reduction::Mean } else { Reduction::Sum }).build().unwrap();
        let mut state = seed;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f64 / f64::from(1 << 20) - 8.0
        };
        let mut model: Vec<Option<Vec<(f64, f64)>>> = vec![None; params.len()];
        for MicroBatch { weight, scale, present } in &batches {
            let mut by = Weight::new(*weight).unwrap();
            if let Some(scale) = scale {
                by = by.with_scale(*scale).unwrap();
            }
            let gradients: Vec<(usize, Values)> = (0..params.len())
                .filter(|&i| present[i])
                .map(|i| (i, Values::new(params[i].0, &(0..params[i].1).map(|_| number()).collect::<Vec<_>>())))
                .collect();
            for (i, values) in &gradients {
                let sums = model[*i].get_or_insert_with(|| vec![(0.0, 0.0); params[*i].1]);
                for (sum, value) in sums.iter_mut().zip(values.exact()) {
                    let term = by.scale() * value;
                    *sum = (sum.0 + term, sum.1 + term.abs());
                }
            }
            let batch: Vec<_> = gradients.iter().rev().map(|(i, values)| (ParamId(*i as u64), values.view())).collect();
            accumulator.add(&batch, by).unwrap();
        }
        let divisor: f64 = if mean { batches.iter().map(|batch| batch.weight).sum() } else { 1.0 };
        let gradients = accumulator.take().unwrap();
        prop_assert_eq!(gradients.count(), batches.len() as u64);
        let mut squares = 0.0;
        for (i, sums) in model.iter().enumerate() {
            let gradient = gradients.get(ParamId(i as u64)).unwrap();
            prop_assert_eq!(gradient.is_some(), sums.is_some());
            let (Some(gradient), Some(sums)) = (gradient, sums) else { continue };
            let (got, unit): (Vec<f64>, f64) = match gradient.dtype() {
                DType::F64 => (gradient.as_slice::<f64>().unwrap().to_vec(), 2.0_f64.powi(-53)),
                _ => (gradient.as_slice::<f32>().unwrap().iter().map(|&x| x.into()).collect(), 2.0_f64.powi(-24)),
            };
            prop_assert_eq!(got.len(), sums.len());
            for (got, (sum, magnitude)) in got.iter().zip(sums) {
                let bound = (batches.len() + 4) as f64 * unit * magnitude / divisor + 1e-40;
                prop_assert!((got - sum / divisor).abs() <= bound, "{} instead of {}", got, sum / divisor);
                squares += got * got;
            }
        }
        prop_assert!((gradients.norm().unwrap() - squares.sqrt()).abs() <= 1e-6 * squares.sqrt());
        let mut visited = 0;
        gradients.for_each_gradient(&mut |_, _| visited += 1).unwrap();
        prop_assert_eq!(visited, gradients.ids().len());
    }
}
