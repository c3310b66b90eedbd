"""What the texts are about: concepts, and the phrases that mean each of them. No torch.

A phrase of a concept can stand for any other of it. A line begins with the concept's name; ` | ` parts phrases.
"""

Concepts = dict[str, tuple[str, ...]]


def _read(text: str) -> Concepts:
    lines = (line.partition(":") for line in text.strip().splitlines())
    return {name.strip(): tuple(phrase.strip() for phrase in rest.split("|")) for name, _, rest in lines}


THINGS = _read("""
order: order | purchase | things I ordered | basket
subscription: subscription | membership | monthly plan
password: password | login code | secret word | passcode
account: account | profile | user account
invoice: invoice | bill | receipt
parcel: parcel | package | delivery | shipment
appointment: appointment | meeting | slot
room: room | hotel room | bedroom
flight: flight | plane ticket | plane journey
train ticket: train ticket | rail ticket | seat on the train
car: car | rental car | vehicle | automobile
phone: phone | mobile | handset | cell phone
computer: computer | laptop | notebook | machine
printer: printer | printing machine
photo: photo | picture | image | snapshot
file: file | document | paper
message: message | email | letter | mail
address: address | street address | postal address
card: bank card | credit card | debit card
contract: contract | agreement
course: course | class | lesson | training
book: book | novel | volume
shoes: shoes | boots | trainers | footwear
jacket: jacket | coat
bicycle: bicycle | bike
kitchen: kitchen | cooker | oven | stove
heating: heating | radiator | boiler
garden: garden | yard | lawn
dog: dog | puppy
cat: cat | kitten
child: child | kid | son or daughter
passport: passport | travel document | identity card
insurance: insurance | cover | policy
salary: salary | wage | pay | earnings
holiday: holiday | vacation | leave | days off
table: table at the restaurant | restaurant table | dinner table
meal: meal | lunch | dinner | food
medicine: medicine | tablets | pills | drug
window: window | pane of glass
key: key | door key
screen: screen | display | monitor
battery: battery | power pack
app: app | program | software | application
voucher: voucher | gift card | discount code | coupon
""")

ACTIONS = _read("""
refund: get my money back for | be paid back for | get a refund for | be reimbursed for | return and be repaid for
cancel: cancel | call off | stop | end | get rid of
change: change | edit | update | alter | modify
delete: delete | remove | erase | wipe
lost: find the lost | recover the missing | get back the lost | look for the missing
track: track | follow | see where to find | check the progress of
pay: pay for | settle the cost of | give money for
book: book | reserve | make a reservation for | arrange
repair: repair | fix | mend | get working again
buy: buy | purchase | get | order a new
sell: sell | find a buyer for
share: share | give others | let friends use
download: download | save a copy of | get a copy of
print: print | put on paper
extend: extend | renew | prolong | keep for longer
clean: clean | wash | get the dirt off
open: open | unlock | get into
send: send | post | mail | dispatch
protect: protect | secure | keep safe | guard
choose: choose | pick | select | decide on
""")

# what can be done with what; the passage that answers says it in these words
SENSE = """
refund: order subscription flight train ticket room course shoes jacket voucher meal insurance phone book

change: password address appointment flight room account order photo file contract holiday card message
delete: account photo file message app profile password order
lost: password parcel phone key passport card cat dog voucher invoice file train ticket
track: parcel order flight phone salary
pay: invoice order parcel room meal course insurance subscription train ticket car
book: appointment room flight train ticket car course table holiday
repair: car phone computer printer shoes jacket bicycle heating window screen kitchen app file
buy: phone battery car computer shoes book insurance train ticket jacket bicycle medicine voucher printer
sell: car bicycle phone computer book shoes
share: photo file subscription car invoice account
download: invoice app file photo book contract message
print: invoice photo file message train ticket voucher
extend: subscription contract passport card insurance holiday battery
clean: kitchen shoes jacket window car screen dog garden
open: account file window message key
send: parcel invoice message photo file book voucher
protect: account password phone child garden card bicycle computer
choose: insurance course computer shoes medicine password dog meal
"""

# beside how an action is asked for: other ways to say that one wants it, and what helps
WISHES: dict[str, tuple[str, ...]] = {
    "refund": (
        "I am not happy with the {} and want my money back",
        "can I return the {}",
        "please pay me back the {}",
    ),
    "cancel": ("I do not need the {} any more", "I no longer want the {}", "please stop the {}"),
    "change": ("the {} is wrong", "I made a mistake in the {}", "my {} needs to be different"),
    "delete": ("the {} should be gone", "I do not want anyone to see the {}", "make the {} disappear"),
    "lost": ("I forgot my {}", "I lost my {}", "where is my {}", "my {} has vanished", "I cannot remember my {}"),
    "track": ("when will my {} arrive", "where is my {} now", "why is the {} late", "has my {} left yet"),
    "pay": (
        "what ways of paying for the {} are there",
        "do you take cash for the {}",
        "how much does the {} cost",
    ),
    "book": ("I need a {} for next week", "is a {} free on Monday", "we would like to have a {}"),
    "repair": ("my {} is broken", "the {} does not work", "the {} stopped working", "there is a fault in the {}"),
    "buy": ("I need a new {}", "where can I get a {}", "do you sell a {}"),
    "sell": ("I want to part with my {}", "who would take my old {}", "what is my used {} worth"),
    "share": ("my friend should have the {} too", "can two people use one {}", "others should see the {}"),
    "download": ("I want the {} on my own disk", "how do I keep the {} offline", "where is a copy of the {}"),
    "print": ("I need the {} on paper", "a paper copy of the {}"),
    "extend": ("my {} runs out soon", "the {} is about to end", "my {} has expired", "how long does the {} last"),
    "clean": ("the {} is dirty", "there are stains on the {}", "there is mud on the {}"),
    "open": ("I am locked out of the {}", "the {} will not open", "I cannot get into the {}"),
    "send": ("the {} has to go to my aunt", "how do I get the {} to another city", "what is the postage for a {}"),
    "protect": ("someone might steal the {}", "is the {} safe", "I worry about thieves and the {}"),
    "choose": ("which {} is right for me", "what {} do you advise", "what is the best {}"),
}

ANSWERS: dict[str, tuple[str, ...]] = {
    "refund": (
        "We refund the {} within thirty days: send it back and the sum returns to your bank.",
        "Refunds: whoever returns the {} is repaid in full within two weeks.",
        "If the {} does not please you, you are reimbursed the whole price.",
    ),
    "cancel": (
        "The {} can be cancelled at any time under settings, without a fee.",
        "Cancelling: end the {} one day before it begins and nothing is charged.",
        "To terminate the {}, press cancel and confirm.",
    ),
    "change": (
        "Details of the {} are edited on the page of settings; save when you have finished.",
        "Changes: a new {} replaces the old one at once after you press update.",
        "You may modify the {} as often as you like.",
    ),
    "delete": (
        "Deleting: press the bin beside the {} and it is removed for ever.",
        "The {} is erased from our servers within a day after you remove it.",
        "Whoever deletes the {} cannot bring it back.",
    ),
    "lost": (
        "Lost and found: if the {} is missing, fill in the form and we help you recover it.",
        "Press forgot, and we send a link with which the {} is restored.",
        "A lost {} is replaced after you report it to us.",
    ),
    "track": (
        "Tracking: the number in our mail shows where the {} is and when it arrives.",
        "The {} takes three days; its progress is shown on the map.",
        "The status of the {} is updated every hour.",
    ),
    "pay": (
        "Payment: the {} can be paid by card, by transfer or in cash.",
        "The price of the {} is due within ten days; we take all usual cards.",
        "We charge for the {} at the end of the month.",
    ),
    "book": (
        "Reservations: choose a day and a time, and the {} is kept for you.",
        "A {} is booked by telephone or online until eight in the evening.",
        "Bookings of a {} are confirmed by mail.",
    ),
    "repair": (
        "Repairs: our workshop mends the {} within three days.",
        "If the {} is defective, switch it off and on, then call a technician.",
        "Faults of the {} are fixed free of charge in the first two years.",
    ),
    "buy": (
        "Shop: a new {} costs less on Fridays and is in stock.",
        "The {} is sold in our store and online, from twenty euros.",
        "Customers who want a {} find offers on the first page.",
    ),
    "sell": (
        "Second hand: put a price on the {} and buyers write to you.",
        "We pay a fair price for a used {}.",
        "Sellers add three pictures of the {} to their advertisement.",
    ),
    "share": (
        "Sharing: invite others with a link, and they have access to the {}.",
        "Up to five people of a family may use one {} together.",
        "Press share to let other people see the {}.",
    ),
    "download": (
        "Downloads: the arrow beside the {} saves it on your disk.",
        "A copy of the {} is stored on your device and can be read offline.",
        "Export the {} under my files.",
    ),
    "print": (
        "Printing: choose paper size and press print to get the {} on paper.",
        "A printed {} is sent to you on request.",
        "The {} comes out of the machine in colour or in black.",
    ),
    "extend": (
        "Renewal: the {} is valid for a year and is prolonged by one click.",
        "Before the {} expires we remind you to renew it.",
        "An expired {} is extended at the desk.",
    ),
    "clean": (
        "Cleaning: wash the {} with warm water and a little soap.",
        "Stains on the {} go away with vinegar and a soft cloth.",
        "Wipe the {} once a week so that no dirt stays.",
    ),
    "open": (
        "Access: the {} opens with the code that we have sent.",
        "If the {} is locked, enter the number on the back to unlock it.",
        "Double click to open the {}.",
    ),
    "send": (
        "Post: pack the {} well, write the address on it and bring it to the counter.",
        "Sending the {} abroad costs nine euros of postage.",
        "We forward the {} to any address on the same day.",
    ),
    "protect": (
        "Safety: a lock and a second code keep the {} from thieves.",
        "Never show the {} to strangers; that keeps it secure.",
        "How to guard the {} against theft and damage.",
    ),
    "choose": (
        "Advice: which {} suits you depends on how often you use it.",
        "Compare size, price and quality before you decide on the {}.",
        "Our guide helps you select the right {}.",
    ),
}

EVENTS: dict[str, Concepts] = {
    "who": _read("""
woman: a woman | a lady
man: a man | a guy | a gentleman
child: a child | a kid | a little one
student: a student | a pupil
doctor: a doctor | a physician
driver: a driver | a chauffeur
cook: a cook | a chef
farmer: a farmer | a grower
dog: a dog | a hound
cat: a cat | a kitten
horse: a horse | a pony
musician: a musician | a player of music
worker: a worker | a labourer
teacher: a teacher | an instructor
sailor: a sailor | a seaman
nurse: a nurse | a carer
"""),
    "does": _read("""
eats: is eating | eats | is having a meal
sleeps: is sleeping | is asleep | takes a nap
runs: is running | runs | races along
cuts vegetables: is cutting vegetables | slices vegetables | is chopping an onion
plays guitar: is playing the guitar | plays a guitar | strums a guitar
reads: is reading a book | reads a novel | is busy with a book
sings: is singing | sings a song
dances: is dancing | dances to music
cleans: is cleaning | is washing up | sweeps the floor
swims: is swimming | swims in the water
talks: is talking on the phone | makes a telephone call | speaks into a mobile
drinks: is drinking | has a drink | sips some water
works: is working | does a job | is busy at work
climbs: is climbing | climbs upwards
waits: is waiting | stands in a queue
paints: is painting a picture | paints | draws with colours
repairs: is repairing an engine | fixes a motor | mends a machine
rides: is riding a bicycle | rides a bike | is cycling
"""),
    "where": _read("""
kitchen: in the kitchen | next to the stove
garden: in the garden | on the lawn | in the yard
street: on the street | on the road | along the avenue
beach: on the beach | by the sea | at the seaside
forest: in the forest | in the woods | among the trees
mountain: on the mountain | on a high hill | near the summit
school: at school | in the classroom
station: at the station | on the platform
hospital: in the hospital | at the clinic
shop: in the shop | at the store | in the supermarket
boat: on a boat | on board a ship
office: in the office | at a desk
"""),
    "when": _read("""
morning: in the morning | at dawn | early in the day
night: at night | after midnight | in the dark
rain: in the rain | while it pours | in wet weather
winter: in winter | in the snow | when it is cold
summer: in summer | in the heat | on a hot day
noon: at noon | at midday
weekend: at the weekend | on Sunday
"""),
}

TOPICS = _read("""
sport: football | team | goal | match | player | coach | league | tennis | stadium | champion | race | score
cooking: recipe | oven | flour | butter | soup | bake | spice | dough | boil | sauce | garlic | pan | cake | chef
weather: rain | storm | cloud | sunshine | wind | temperature | forecast | snow | thunder | fog | degrees | frost
money: bank | loan | interest | savings | tax | price | budget | shares | credit | debt | market | invest | account
travel: airport | hotel | luggage | journey | tourist | passport | flight | beach | museum | island | guide
health: doctor | pain | fever | medicine | hospital | heart | cough | sleep | patient | blood | diet | illness
computing: computer | software | server | code | database | program | keyboard | network | bug | memory | file
gardening: garden | soil | seeds | roses | weeds | compost | lawn | watering | tomato | pruning | leaves | spade
music: song | guitar | concert | orchestra | melody | piano | singer | rhythm | band | violin | opera | album
school: teacher | pupil | exam | homework | lesson | classroom | university | grade | essay | mathematics | degree
animals: dog | cat | horse | bird | fur | paw | puppy | feed | wild | nest | tail | veterinarian | zoo
space: planet | star | rocket | moon | telescope | orbit | astronaut | galaxy | comet | gravity | satellite | mars
law: court | judge | lawyer | contract | crime | police | trial | prison | witness | rights | verdict | law
cars: engine | brake | tyre | garage | petrol | driver | motorway | gearbox | wheel | mechanic | speed | traffic
home: house | kitchen | sofa | roof | rent | furniture | bathroom | landlord | curtain | wall | paint | bedroom
""")
