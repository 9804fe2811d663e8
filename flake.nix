{
  description = "Flake for the optimizer kernel";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
      # What the tests import beside torch and pytest: they load the kernel as users do.
      pythonCheckInputs = python: [ python.kernels python.numpy ];
    };
}
