"""Twenty faults planted by someone who has not read the doctor's code: how many does ``fldiag doctor`` name?

    python analyses/doctor_planted.py [--only uniform_mean,divisor] [--runs /tmp/planted] [--out analyses]

The list was fixed before the doctor was run once, and one fault stands for each mechanism. Each is planted in a small federation
on the digits (a plain loop handed to ``fldiag.Recorder``; 17 by ``fldiag.train``), and each has a clean twin with the same seed
and settings. What must be named, and about whom, for a fault to count as found:

 1 uniform_mean      the server averages uniformly although it says it weights by n             the weights of the mean
 2 counted_twice     one client's state stands twice in the server's list, another's not at all   the mean, or that client's weight
 3 divisor           weights are n_k over all clients' n, not over that of the sampled          the mean (weights sum to less than 1)
 4 stale_broadcast   the server goes on broadcasting the initial model                          received is not the last aggregate
 5 last_buffers      batch-norm's running statistics are the last client's                      whose buffers
 6 adam_buffers      server Adam also steps running variances, which become negative            variances or NaN
 7 returns_received  client 2's optimiser holds another model's parameters: it sends back the received weights   client 2
 8 old_model         client 5 sends the file that it wrote when it was first drawn              client 5
 9 summed_loss       client 6 sums its loss over the batch instead of averaging it              client 6
10 shared_module     all clients train one module, without a copy: all uploads are the last one's   copies
11 never_drawn       clients are drawn from range(n - 1): the last never is                     the last client
12 shuffled_labels   client 4's labels are out of step with its inputs                          client 4
13 leaked_test       forty test examples are among client 3's training data                     test examples in training data
14 dead_relus        biases of a far too wide uniform initialisation below 0                    dead units
15 collapsed_head    the clients' loader says y >= 5 instead of y                               few classes predicted
16 best_reported     the accuracy of the log is the best one so far                             best instead of last
17 lr_too_high       learning rate 20 instead of 0.1                                            chance, or that it diverged
18 seed_unused       two runs with seeds 0 and 1, and torch.manual_seed(0) in the loop          equal bits
19 shuffle_unseeded  two runs of seed 0, whose order of batches is drawn without a seed         different bits
20 mean_of_clients   the accuracy of the log is the mean of the clients' own on their own data  not the global model's

A fault is found where a finding of severity fault or warning names this. Information is written down, and does not count. A twin is
clean where it has no finding of these two severities.
"""
